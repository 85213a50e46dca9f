"""Batch invariance of a kernel: bitwise comparisons of the same sequence in different calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from capture.call.attention_call import AttentionCall
from replay.bench.forms import Forms
from replay.bench.settings import Settings
from replay.diagnosis.derived_batches import (
    Trial,
    alone,
    in_chunks,
    in_company,
    lengths,
    of_sequences,
    rows,
)
from replay.diagnosis.examine import HARMLESS
from replay.diagnosis.kernel_runner import runner
from replay.isolation.process_state import ProcessState
from replay.kernels.failures import classify
from replay.kernels.registry import Kernel

Case = Literal["repeated", "alone", "company", "chunked"]
Outcome = Literal["equal", "differs", "refused", "failed", "inconclusive"]

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtype for the bits of an element, by bytes per element."""


@dataclass(frozen=True)
class Verdict:
    """Verdict on a kernel in one case of a call."""

    outcome: Outcome
    sentence: str = ""
    """First difference, or the reason of a refusal or failure; empty if the bits are equal."""


class _Undecided(Exception):
    """End of a case without a comparison."""

    def __init__(self, outcome: Outcome, reason: str) -> None:
        super().__init__(reason)
        self.verdict = Verdict(outcome, reason)


def examine_invariance(
    kernel: Kernel,
    call: AttentionCall,
    settings: Settings,
    process_state: ProcessState,
    chunk: int,
) -> dict[Case, Verdict]:
    """Return a verdict for each case that applies to a call.

    The recorded call runs in memory without gaps, like the calls derived from it.

    Args:
        chunk: number of queries in a chunk.

    Raises:
        ContextLost: the kernel made the GPU, or this process, unusable.
    """
    form = Forms.of(call).form(kernel, settings.device)
    process_state.restore(kernel.name)  # importing the library may change it
    if form.refused is not None:
        status, reason = form.refused
        return {"repeated": Verdict("refused" if status in HARMLESS else "failed", reason)}
    kernel = kernel.loaded()
    run = _run(kernel, settings, process_state)
    whole = of_sequences(form.call, range(len(lengths(form.call))))
    try:
        first = run(whole)
        repeated = difference(run(whole), first)
    except _Undecided as undecided:
        return {"repeated": undecided.verdict}
    if whole.cu_seqlens_q is not None and whole.attn_mask is not None:
        trials: dict[Case, Iterator[Trial]] = {}  # the mask would have to be divided too
    else:
        chunked = in_chunks(whole, chunk, kernel.refuses)
        trials = {"alone": alone(whole), "company": in_company(whole), "chunked": chunked}
    if repeated:
        unknown = Verdict("inconclusive", "the kernel is not deterministic")
        return {"repeated": Verdict("differs", repeated), **dict.fromkeys(trials, unknown)}

    verdicts = {case: _verdict(each, run, whole, first) for case, each in trials.items()}
    found = {case: verdict for case, verdict in verdicts.items() if verdict is not None}
    return {"repeated": Verdict("equal"), **found}


def _verdict(
    trials: Iterator[Trial],
    run: Callable[[AttentionCall], Tensor],
    call: AttentionCall,
    output: Tensor,
) -> Verdict | None:
    """Compare until the first difference; return None if there was nothing to compare.

    Args:
        call, output: call that has run, and its output.
    """
    verdict = None
    try:
        for trial in trials:
            if trial.expected.call is not call:
                call, output = trial.expected.call, run(trial.expected.call)
            other = rows(run(trial.other.call), trial.other)
            if found := difference(other, rows(output, trial.expected)):
                if difference(rows(run(trial.other.call), trial.other), other):
                    return Verdict("inconclusive", f"{trial.place}: equal calls differ")
                return Verdict("differs", f"{trial.place}: {found}")
            verdict = Verdict("equal")
    except _Undecided as undecided:
        return undecided.verdict
    except (MemoryError, RuntimeError) as error:
        status, reason = classify(error)
        if status != "out-of-memory":
            raise
        return Verdict("inconclusive", reason)
    return verdict


def _run(
    kernel: Kernel, settings: Settings, process_state: ProcessState
) -> Callable[[AttentionCall], Tensor]:
    """Return a function that runs a kernel on a copy of a call, and raises `_Undecided`."""

    def failed(_: AttentionCall, reason: str) -> Tensor:
        raise _Undecided("failed", reason)

    run_on = runner(kernel, settings, process_state, failed)

    def run(call: AttentionCall) -> Tensor:
        if reason := kernel.refuses(call):
            raise _Undecided("refused", reason)
        output = run_on(call.to(call.device))
        if output is None:
            raise _Undecided("failed", "returned no tensor of the output's shape and dtype")
        return output.clone()  # the kernel may return the same memory again

    return run


def difference(output: Tensor, expected: Tensor) -> str:
    """Describe the first element (B, Hq, Sq, Dv) whose bits differ; empty if all bits are equal."""
    integer = INTEGERS[output.element_size()]
    unlike = output.contiguous().view(integer) != expected.contiguous().view(integer)
    if not unlike.any():
        return ""
    place = tuple(unlike.nonzero()[0].tolist())
    sequence, head, query, element = place
    of_batch = f"sequence {sequence}, " if output.shape[0] > 1 else ""
    largest = (output.double() - expected.double()).abs().nan_to_num().max()
    return (
        f"first at {of_batch}head {head}, query {query}, element {element}: "
        f"{float(output[place]):.9g} != {float(expected[place]):.9g}, {int(unlike.sum()):,} of "
        f"{unlike.numel():,} elements, largest difference {float(largest):.2g}"
    )
