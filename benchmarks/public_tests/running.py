"""Draws parametrisations of a test and runs the test on them."""

from __future__ import annotations

import contextlib
import gc
import io
import itertools
import math
import random
import re
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import pytest
import torch

from benchmarks.public_tests.answers import Answers
from benchmarks.public_tests.flash_attn_shim import FlashAttn

Arguments = dict[str, Any]
DRAWN_FOR_EACH = 30
"""Maximum number of parametrisations drawn per judged run, because most need other features."""


NO_MEMORY = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUBLAS_STATUS_NOT_INITIALIZED")
"""Error messages that occur when other processes use the GPU's memory."""


class Outcome(NamedTuple):
    result: Literal["passed", "failed", "skipped"]
    sentence: str = ""
    """Reason why the test was skipped or failed."""


def parametrisations(test: Callable[..., None]) -> tuple[list[tuple[str, ...]], list[list[Any]]]:
    """Return the names and values of each of a test's `parametrize` marks."""
    names, values = [], []
    for mark in getattr(test, "pytestmark", []):
        if mark.name == "parametrize":
            given = mark.args[0]
            several = given.split(",") if isinstance(given, str) else given
            names.append(tuple(name.strip() for name in several))
            values.append([each for each in mark.args[1] if not hasattr(each, "marks")])
    return names, values


def draw(test: Callable[..., None], seed: int, largest: int | None = None) -> Iterator[Arguments]:
    """Yield a test's parametrisations in a random order that the seed decides.

    Args:
        largest: omit parametrisations with larger numbers.
    """
    names, values = parametrisations(test)
    if largest is not None:
        values = [[each for each in some if _largest(each) <= largest] for some in values]
    total = math.prod(map(len, values))
    rng = random.Random(f"{seed} {test.__name__}")
    for number in rng.sample(range(total), min(total, 100_000)):
        arguments: Arguments = {}
        for several, some in zip(names, values, strict=True):
            number, place = divmod(number, len(some))
            value = some[place]
            arguments.update(zip(several, (value,) if len(several) == 1 else value, strict=True))
        yield arguments


def _largest(value: Any) -> float:
    parts = value if isinstance(value, tuple) else (value,)
    return max((each for each in parts if isinstance(each, int | float)), default=0)


def run(test: Callable[..., None], arguments: Arguments, answers: Answers | FlashAttn) -> Outcome:
    """Run a test once."""
    for mark in getattr(test, "pytestmark", []):
        if mark.name in ("skipif", "xfail") and (not mark.args or mark.args[0]):
            return Outcome("skipped", str(mark.kwargs.get("reason", mark.name)))
    before, printed = answers.calls, io.StringIO()
    torch.manual_seed(0)
    try:
        with contextlib.redirect_stdout(printed):
            test(**arguments)
    except (pytest.skip.Exception, pytest.xfail.Exception) as reason:
        return Outcome("skipped", _in_general(str(reason)) or "the test's own choice")
    except Exception as error:
        if any(each in str(error) for each in NO_MEMORY):
            return Outcome("skipped", "out of memory")
        line = traceback.extract_tb(error.__traceback__)[-1]
        said = " ".join(str(error).split())[:200] or type(error).__name__
        last = [each for each in printed.getvalue().splitlines() if "max diff" in each][-2:]
        return Outcome("failed", "; ".join([f"{said} ({line.filename}:{line.lineno})", *last]))
    finally:
        gc.collect()
        torch.cuda.empty_cache()
    if answers.calls == before:
        return Outcome("skipped", "the kernel was not called")
    return Outcome("passed")


def _in_general(reason: str) -> str:
    """Return a reason without its varying parts, so that it can be counted."""
    return re.sub(r"(, not \d+.*| \(.*)$", "", re.sub(r"^(head_dim) \d+", r"\1", reason))


def sample(
    test: Callable[..., None],
    answers: Answers | FlashAttn,
    judged: int,
    share: slice,
    seed: int,
    until: float,
    largest: int | None = None,
) -> Iterator[tuple[Arguments, Outcome]]:
    """Run a test until it was judged often enough; yield skipped runs too.

    Args:
        judged: number of runs that must pass or fail.
        share: share of the drawn parametrisations to run.
        until: time of the monotonic clock after which no run begins.
    """
    drawn = itertools.islice(draw(test, seed, largest), share.start, None, share.step)
    count = 0
    for arguments in itertools.islice(drawn, judged * DRAWN_FOR_EACH):
        if count == judged or time.monotonic() > until:
            return
        outcome = run(test, arguments, answers)
        count += outcome.result != "skipped"
        yield arguments, outcome
