"""Outputs of earlier inputs, from a cache or from a graph replayed without new inputs."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from capture.call.attention_call import AttentionCall
from replay.diagnosis.derived import HeadRows, changed, write
from replay.diagnosis.subject import COLLAPSE, EXPLAINED, Evidence, KernelRunner, Score, Subject
from replay.rows.errors_of_output import AccuracyClass

CALLS_BEFORE = 3
"""Number of calls after which a CUDA graph may be replayed."""

ROWS = 32


@dataclass(frozen=True)
class Probe:
    """Kernel and call for `stale`; the kernel may be correct when called once."""

    call: AttentionCall
    run_on: KernelRunner
    accuracy_class: AccuracyClass = "exact"
    chosen: Callable[[AttentionCall], Tensor] | None = None


def stale(probe: Probe) -> Evidence | None:
    """Test whether the kernel returns the output of earlier input values.

    First, other values are written to the same memory, as in a model's next step. Then the call is
    moved to other memory.
    """
    recorded, other = probe.call, changed(probe.call)
    memory = recorded.to(recorded.device)
    old = None
    for _ in range(CALLS_BEFORE):
        write(memory, recorded)
        old = _copy(probe.run_on(memory))
    if old is None:
        return None
    # A kernel that has not seen the other values yet, and computes with them, misreads its inputs.
    if from_old_values(probe, old, None, "", right=recorded, before=other):
        return None
    write(memory, other)
    in_place = _copy(probe.run_on(memory))
    elsewhere_memory = recorded.to(recorded.device)
    write(memory, other)  # a kernel that reads the old memory then returns the other output
    elsewhere = _copy(probe.run_on(elsewhere_memory))
    where = "new values in the same memory"
    found = from_old_values(probe, in_place, old, where, right=other, before=recorded)
    return found or from_old_values(
        probe, elsewhere, in_place, "other values in other memory", right=recorded, before=other
    )


def kept_from_earlier_calls(calls: int, sentence: str) -> Evidence:
    """Return the evidence for a call that is correct as a process's first call, but wrong later.

    Args:
        calls: number of earlier calls.
        sentence: sentence about the error of the later call, or empty.
    """
    others = "another call" if calls == 1 else f"{calls:,} other calls"
    colon = ": " if sentence else ""
    return Evidence(
        "stale-graph",
        f"it is right as the first call of a process and wrong after {others}, so the kernel keeps "
        f"something of earlier calls{colon}{sentence}",
        {"calls_before": calls},
    )


def _copy(output: Tensor | None) -> Tensor | None:
    return None if output is None else output.clone()


def from_old_values(
    probe: Probe,
    output: Tensor | None,
    last: Tensor | None,
    where: str,
    *,
    right: AttentionCall,
    before: AttentionCall,
) -> Evidence | None:
    """Return evidence if an output is that of old values of all or some inputs.

    Args:
        last: output of the previous call.
        where: description of the new values and their memory.
        right: the call.
        before: the previous call.
    """
    if output is None:
        return None
    if last is not None and _same_output(output, last):
        return Evidence(
            "stale-graph",
            f"given {where}, it returned the same bits as for the old values",
            {"where": where, "same_bits": True, "stale": ["query", "key", "value"]},
        )
    # A few rows suffice, because stale inputs affect all rows.
    rows = torch.linspace(0, output.shape[2] - 1, min(ROWS, output.shape[2])).long()
    place = HeadRows(0, 0, rows.to(output.device))
    blank = Score(False, 0.0)
    subject = Subject(right, output, place, blank, probe.run_on, probe.accuracy_class, probe.chosen)
    own = subject.score(output, right)
    if own.passes or own.error <= EXPLAINED:
        return None
    # The largest subset comes first, because a graph usually keeps all of its inputs.
    for size in (3, 2, 1):
        for names in itertools.combinations(("query", "key", "value"), size):
            mixed = right.with_tensors({name: getattr(before, name) for name in names})
            score = subject.score(output, mixed)
            if score.passes or score.error <= min(EXPLAINED, own.error / COLLAPSE):
                return Evidence(
                    "stale-graph",
                    f"given {where}, it computed with the {' and '.join(names)} of the call before",
                    {
                        "where": where,
                        "same_bits": False,
                        "stale": list(names),
                        "error": own.error,
                        "error_with_old_values": score.error,
                    },
                )
    return None


def _same_output(one: Tensor, other: Tensor) -> bool:
    """Return True if two outputs are bitwise equal and not constant."""
    finite = one.isfinite()
    if not bool(finite.all()) or bool((one == one.flatten()[0]).all()):
        return False
    return torch.equal(one, other)
