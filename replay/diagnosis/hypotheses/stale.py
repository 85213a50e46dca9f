"""Outputs that belong to earlier inputs: a graph replayed without new inputs, or a cache."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from capture.call.attention_call import AttentionCall
from capture.call.strides import narrow_expanded
from replay.diagnosis.derived import HeadRows, changed
from replay.diagnosis.subject import COLLAPSE, EXPLAINED, Evidence, KernelRunner, Score, Subject
from replay.rows.errors_of_output import AccuracyClass

CALLS_BEFORE = 3
"""Number of calls after which a CUDA graph may be replayed."""

ROWS = 32


class _Trial(NamedTuple):
    where: str
    right: AttentionCall
    before: AttentionCall
    """Call that the kernel ran before."""


@dataclass(frozen=True)
class Probe:
    """Kernel and call for `stale`; the kernel may be correct when called once."""

    call: AttentionCall
    run_on: KernelRunner
    accuracy_class: AccuracyClass = "exact"
    chosen: Callable[[AttentionCall], Tensor] | None = None


def stale(probe: Probe) -> Evidence | None:
    """Test whether the kernel returns the output of earlier input values.

    First the same memory gets other values, as in a model's next step. Then the call moves to other
    memory.
    """
    recorded, other = probe.call, changed(probe.call)
    memory = recorded.to(recorded.device)
    old = None
    for _ in range(CALLS_BEFORE):
        _write(memory, recorded)
        old = _copy(probe.run_on(memory))
    if old is None:
        return None
    _write(memory, other)
    in_place = _copy(probe.run_on(memory))
    elsewhere_memory = recorded.to(recorded.device)
    _write(memory, other)  # a kernel that reads the old memory then returns the other output
    elsewhere = _copy(probe.run_on(elsewhere_memory))
    trials = (
        (in_place, old, _Trial("new values in the same memory", other, recorded)),
        (elsewhere, in_place, _Trial("other values in other memory", recorded, other)),
    )
    for output, last, trial in trials:
        if output is not None and (found := _judged(probe, output, last, trial)):
            return found
    return None


def kept_from_earlier_calls(calls: int, sentence: str) -> Evidence:
    """Return the evidence for a call that is correct as the first of a process, but wrong later.

    Args:
        calls: number of earlier calls.
        sentence: sentence about the error of the later call.
    """
    others = "another call" if calls == 1 else f"{calls:,} other calls"
    return Evidence(
        "stale-graph",
        f"it is right as the first call of a process and wrong after {others}, so the kernel keeps "
        f"something of earlier calls: {sentence}",
        {"calls_before": calls},
    )


def _write(target: AttentionCall, values: AttentionCall) -> None:
    given = values.tensors()
    for name, tensor in target.tensors().items():
        if name in given and name != "output":
            narrow_expanded(tensor).copy_(narrow_expanded(given[name]))


def _copy(output: Tensor | None) -> Tensor | None:
    return None if output is None else output.clone()


def _judged(probe: Probe, output: Tensor, last: Tensor | None, trial: _Trial) -> Evidence | None:
    if last is not None and _same_output(output, last):
        return Evidence(
            "stale-graph",
            f"given {trial.where}, it returned the same bits as for the old values",
            {"where": trial.where, "same_bits": True, "stale": ["query", "key", "value"]},
        )
    # A few rows suffice, because stale inputs affect all rows.
    rows = torch.linspace(0, output.shape[2] - 1, min(ROWS, output.shape[2])).long()
    place = HeadRows(0, 0, rows.to(output.device))
    blank = Score(False, 0.0)
    subject = Subject(
        trial.right, output, place, blank, probe.run_on, probe.accuracy_class, probe.chosen
    )
    right = subject.score(output, trial.right)
    if right.passes or right.error <= EXPLAINED:
        return None
    # The largest subset comes first, because a graph usually keeps all of its inputs.
    for names in _subsets(("query", "key", "value")):
        mixed = trial.right.with_tensors({name: getattr(trial.before, name) for name in names})
        score = subject.score(output, mixed)
        if score.passes or score.error <= min(EXPLAINED, right.error / COLLAPSE):
            return Evidence(
                "stale-graph",
                f"given {trial.where}, it computed with the {' and '.join(names)} of the call "
                "before",
                {
                    "where": trial.where,
                    "same_bits": False,
                    "stale": list(names),
                    "error": right.error,
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


def _subsets(names: Sequence[str]) -> list[tuple[str, ...]]:
    sizes = range(len(names), 0, -1)
    return [each for size in sizes for each in itertools.combinations(names, size)]
