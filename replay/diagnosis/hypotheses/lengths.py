"""Lengths that are not multiples of a kernel's block."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from replay.diagnosis.derived import HeadRows, can_be_gathered, gathered
from replay.diagnosis.subject import MOST_ROWS, Evidence, Score, Subject

BLOCKS = (2, 4, 8, 16, 32, 64, 128, 256)

MOST_SCORES = 2**28
"""Maximum number of scores (B · Hq · Sq · Sk) of a lengthened call: 1 GiB in float32."""

Lengths = tuple[int, int]
"""Numbers of queries and keys."""

Which = tuple[bool, bool]
"""Flags for queries and keys: True if their number is changed."""

NAMES: dict[Which, str] = {
    (False, True): "keys",
    (True, False): "queries",
    (True, True): "queries and keys",
}


def odd_length(subject: Subject) -> Evidence | None:
    """Test whether the error disappears when the lengths are multiples of a block.

    The call is lengthened to a multiple of the block by prepending copies of its first rows, or
    shortened by dropping its first rows. A length equally far past another multiple must be wrong
    again. This shows that the length is the cause, not a particular key or query.
    """
    call, shape = subject.call, subject.call.shape
    lengths = (shape.q_len, shape.kv_len)
    if not can_be_gathered(call) or all(length % BLOCKS[-1] == 0 for length in lengths):
        return None
    if not _cured(subject, BLOCKS[-1], (True, True)):
        return None
    for which in NAMES:
        for block in BLOCKS:
            odd = [name for name, chosen in zip(lengths, which, strict=True) if chosen]
            if all(length % block == 0 for length in odd):
                continue
            if _cured(subject, block, which) and _is_wrong_beyond(subject, block, which):
                return _evidence(subject, block, which)
    return None


def _lengths(subject: Subject, block: int, which: Which, change: Callable[[int], int]) -> Lengths:
    """Return the numbers of queries and keys, after changing the chosen ones.

    Unequal numbers stay unequal, because a kernel may treat self-attention differently.
    """
    shape, (of_queries, of_keys) = subject.call.shape, which
    q_len = change(shape.q_len) if of_queries else shape.q_len
    kv_len = change(shape.kv_len) if of_keys else shape.kv_len
    return q_len, kv_len + block * (q_len == kv_len and shape.q_len != shape.kv_len)


def _cured(subject: Subject, block: int, which: Which) -> bool:
    """Return True if the kernel is right at the next and the previous multiple."""
    up = _lengths(subject, block, which, lambda length: -(-length // block) * block)
    down = _lengths(subject, block, which, lambda length: length // block * block or length)
    same = (subject.call.shape.q_len, subject.call.shape.kv_len)
    return all(
        subject.cured_by(partial(_tried, subject, each)) for each in (up, down) if each != same
    )


def _is_wrong_beyond(subject: Subject, block: int, which: Which) -> bool:
    """Return True if a length past the next multiple is wrong too; else any change may help."""
    score = _tried(subject, _lengths(subject, block, which, lambda length: length + block))
    return score is not None and not subject.is_cured(score)


def _tried(subject: Subject, lengths: Lengths) -> Score | None:
    """Score the formerly wrong rows at other lengths.

    The error may have moved, so the worst of the last rows is used if its score is worse.
    """
    (q_len, kv_len), shape, (batch, head, rows) = lengths, subject.call.shape, subject.place
    if min(lengths) < 1 or shape.batch * shape.q_heads * q_len * kv_len > MOST_SCORES:
        return None
    call = gathered(
        subject.call,
        queries=_places(shape.q_len, q_len, rows.device),
        keys=_places(shape.kv_len, kv_len, rows.device),
    )
    output = subject.run(call)
    if output is None:
        return None
    last = torch.arange(max(0, q_len - MOST_ROWS // 2), q_len, device=rows.device)
    of_last = subject.score(output, call, HeadRows(batch, head, last))
    found = Score(of_last.passes, of_last.worst)
    moved = rows + q_len - shape.q_len
    if len(moved := moved[moved >= 0]):
        own = subject.score(output, call, HeadRows(batch, head, moved))
        found = Score(found.passes and own.passes, max(found.error, own.error))
    return found


def _places(length: int, wanted: int, device: torch.device) -> Tensor:
    """Return the last `wanted` rows; if there are too few, the first rows are repeated in front."""
    if wanted <= length:
        return torch.arange(length - wanted, length, device=device)
    first = torch.arange(wanted - length, device=device) % length
    return torch.cat([first, torch.arange(length, device=device)])


def _evidence(subject: Subject, block: int, which: Which) -> Evidence:
    shape = subject.call.shape
    lengths = {"queries": shape.q_len, "keys": shape.kv_len}
    what = NAMES[which]
    odd = " and ".join(f"{length:,} {name}" for name, length in lengths.items() if name in what)
    rows = subject.place.queries
    tail = int((rows >= (shape.q_len // block * block or shape.q_len)).sum()) if which[0] else None
    return Evidence(
        "odd-length",
        f"it {subject.fault} at {odd}, which is not a multiple of {block}, and is right when the "
        "call is lengthened or shortened to a multiple",
        {
            "multiple": block,
            "lengths": what,
            "q_len": shape.q_len,
            "kv_len": shape.kv_len,
            "error": subject.own.error,
            "wrong_rows_in_the_tail": tail,
            "wrong_rows": len(rows),
        },
    )
