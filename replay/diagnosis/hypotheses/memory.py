"""Outputs that contain former contents of their memory, or that change from call to call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from replay.diagnosis.derived import HeadRows, mapped
from replay.diagnosis.subject import Evidence, Score, Subject, heads_of
from replay.isolation.inputs import Inputs

POISONS = (1.25, -2.75)
"""Numbers that every output dtype represents exactly, and that rarely occur in outputs."""

REPETITIONS = 4
"""Number of further runs of the unchanged call; if one is correct, the error comes and goes."""

RECURRENCES = 3
"""Number of times that a difference between two fillings of memory must be the same again."""


def unwritten(subject: Subject) -> Evidence | None:
    """Test whether the output contains the former contents of its memory."""

    def allocated(value: float) -> Tensor | None:
        return subject.run_on(subject.call.to(subject.call.device), value)

    def freed(value: float) -> Tensor | None:
        own = subject.call.to(subject.call.device)
        Inputs(own).poison(own, value)  # the kernel will probably get this memory
        return subject.run_on(own)

    for run in (allocated, freed):
        first, second, again = (run(value) for value in (*POISONS, POISONS[0]))
        if first is None or second is None or again is None:
            continue
        differs = _unlike(first, second) & ~_unlike(first, again)
        kept = (first == POISONS[0]) & (second == POISONS[1])
        if bool(kept.any()) or (bool(differs.any()) and _recur(differs, run, first, second)):
            return _evidence(subject, differs, int(kept.sum()))
    return _kept_from_before(subject)


def _recur(
    differs: Tensor, run: Callable[[float], Tensor | None], first: Tensor, second: Tensor
) -> bool:
    """Return True if elements differ in the same way again, and not at random."""
    same = differs.clone()
    for _ in range(RECURRENCES):
        for value, before in zip(POISONS, (first, second), strict=True):
            now = run(value)
            if now is None:
                return False
            same &= ~_unlike(now, before)
    return int(same.sum()) > int(differs.sum()) // 2


def _kept_from_before(subject: Subject) -> Evidence | None:
    """Test whether some rows still hold the previous call's output, in memory that is reused."""
    call = subject.call
    small = {
        "query": mapped(call.query, lambda query: query.clamp(-1, 1)),
        "key": mapped(call.key, lambda key: key.clamp(-1, 1)),
        "value": mapped(call.value, lambda value: value / -16),
    }
    other = replace(call.with_tensors(small), output=None)
    first = None if call.value_is_in_key else subject.run(other)
    if first is None:
        return None
    first = first.clone()  # the kernel may return the same memory again
    second = subject.run(call)
    if second is None:
        return None
    kept = (first == second).all(dim=3) & (second != 0).any(dim=3)
    if not bool(kept.any()) or bool(kept.all()):
        return None
    place = _most_of_a_head(kept)
    return Evidence(
        "output-unwritten",
        f"{int(kept.sum()):,} of {kept.numel():,} rows are still those of the call before, which "
        "had other inputs",
        {"rows": int(kept.sum()), "of": kept.numel(), **_span(place.queries)},
        place,
    )


def zeroed(subject: Subject) -> Evidence | None:
    """Test whether the wrong rows are zeros, as if nothing had written them."""
    batch, head, rows = subject.place
    if bool((subject.output[batch, head, rows] != 0).any()):
        return None
    none = (subject.output == 0).all(dim=3)
    return Evidence(
        "output-unwritten",
        f"{int(none.sum()):,} of {none.numel():,} rows are all zeros, as if nothing wrote them",
        {"zero_rows": int(none.sum()), "rows": none.numel(), **_span(rows)},
    )


def flickering(subject: Subject) -> Evidence | None:
    """Test whether another run of the same call is correct, which makes experiments useless."""
    for _ in range(REPETITIONS):
        again = subject.tried(subject.call)
        if again is not None and subject.is_cured(again):
            return flickers(subject, again)
    return None


def flickers(subject: Subject, right: Score) -> Evidence:
    """Return the evidence for an error that comes and goes, from the score of a correct run."""
    colon = ": " if subject.sentence else ""
    return Evidence(
        "unknown",
        f"with the same inputs it {subject.fault} in some calls and is right in others{colon}"
        f"{subject.sentence}",
        {"error": subject.own.error, "error_when_called_again": right.error, "flickers": True},
    )


def _unlike(one: Tensor, other: Tensor) -> Tensor:
    return (one != other) & ~(one.isnan() & other.isnan())


def _evidence(subject: Subject, differs: Tensor, kept: int) -> Evidence:
    rows = differs.any(dim=3)
    place = _most_of_a_head(rows)
    count = int(differs.sum())
    return Evidence(
        "output-unwritten",
        f"{count:,} of {differs.numel():,} elements of the output, in {int(rows.sum()):,} rows of "
        f"{heads_of(rows)}, show former contents of memory: "
        f"{kept:,} keep a number that was written there before the call",
        {
            "elements": count,
            "of": differs.numel(),
            "keep_the_poison": kept,
            "rows": int(rows.sum()),
            "heads": int(rows.any(dim=2).sum()),
            **_span(place.queries),
        },
        place,
    )


def _most_of_a_head(rows: Tensor) -> HeadRows:
    """Return the head with the largest number of the given rows (B, Hq, Sq), and these rows."""
    by_head = rows.sum(dim=2)
    batch, head = (int(each) for each in divmod(int(by_head.argmax()), by_head.shape[1]))
    return HeadRows(batch, head, rows[batch, head].nonzero().flatten())


def _span(queries: Tensor) -> dict[str, Any]:
    return {"queries": [int(queries.min()), int(queries.max())]}
