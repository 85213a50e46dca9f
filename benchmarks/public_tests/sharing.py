"""Distributes the tests among processes, a few comparisons at a time."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.public_tests.answers import Answers
from benchmarks.public_tests.checkout import load
from benchmarks.public_tests.flash_attn_shim import NAME, FlashAttn
from benchmarks.public_tests.listed import Listed
from benchmarks.public_tests.on_cpu import on_cpu
from benchmarks.public_tests.running import Arguments, Outcome, sample

JUDGED_AT_ONCE = 4
"""Number of comparisons per job. A job takes seconds, most of them spent compiling."""


class Job(NamedTuple):
    """A share of a test's sample, with one kernel."""

    test: Listed
    kernel: str
    checkout: Path
    judged: int
    share: slice


Ran = list[tuple[Arguments, Outcome]]


def play(job: Job, seed: int, until: float, device: str, largest: int | None) -> Ran:
    """Run a job in this process."""
    torch.set_num_threads(1)
    answers = FlashAttn() if job.kernel == NAME else Answers(job.kernel, job.test.asked)
    with on_cpu() if device == "cpu" else contextlib.nullcontext():
        function = load(job.test, job.checkout, answers)
        return list(sample(function, answers, job.judged, job.share, seed, until, largest))


def jobs(tests: list[tuple[Listed, str, Path]], per_test: int) -> Iterator[Job]:
    """Yield every test's first share, then the second ones, so that all tests run before time
    ends."""
    shares = -(-per_test // JUDGED_AT_ONCE)
    for number in range(shares):
        judged = per_test // shares + (number < per_test % shares)
        for test, kernel, checkout in tests:
            yield Job(test, kernel, checkout, judged, slice(number, None, shares))


def played(
    some: list[Job], processes: int, options: tuple[int, float, str, int | None]
) -> Iterator[tuple[Job, Ran]]:
    """Yield each job with its outcomes.

    A job that raises may have lost the GPU, so no further jobs begin.
    """
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        futures = {pool.submit(play, job, *options): job for job in some}
        for future in as_completed(futures):
            try:
                yield futures[future], future.result()
            except RuntimeError as error:  # raised by CUDA or because a process died
                pool.shutdown(wait=False, cancel_futures=True)
                yield futures[future], [({}, Outcome("failed", " ".join(str(error).split())[:300]))]
                return
