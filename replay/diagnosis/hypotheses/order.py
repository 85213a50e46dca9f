"""Errors that depend on the order of keys, caused by a running softmax that is not rescaled."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from capture.call.attention_call import AttentionCall
from capture.call.attention_variant import AttentionVariant
from replay.diagnosis.derived import HeadRows, can_be_gathered, mask_of, part, scores
from replay.diagnosis.subject import Evidence, Subject

BLOCK = 16
"""Number of leading keys that every kernel processes in one step."""

MOST_TRIED = 4
"""Maximum number of rows to test, starting with the worst."""


def late_sink(subject: Subject) -> Evidence | None:
    """Test whether the error disappears when the keys with the largest scores come first."""
    if not can_be_gathered(subject.call):
        return None
    batch, head, rows = subject.place

    def error(row: Tensor) -> float:
        place = HeadRows(batch, head, row[None])
        return subject.score(subject.output, subject.call, place).error

    for row in sorted(rows, key=error, reverse=True)[:MOST_TRIED]:
        if found := _of_row(subject, HeadRows(batch, head, row[None])):
            return found
    return None


def _of_row(subject: Subject, place: HeadRows) -> Evidence | None:
    """Test one row alone: all queries become copies of that row and see the same keys."""
    call = subject.call
    small = part(call, place)
    score = scores(small)[0]
    if small.attn_mask is not None:
        mask = small.attn_mask[0, 0, 0]
        score = score.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else score + mask
    keys = (score > -torch.inf).nonzero().flatten()
    if len(keys) <= BLOCK:
        return None
    score = score[keys]
    as_recorded = _alone(call, place, keys)
    where = HeadRows(place.batch, place.head, torch.arange(1, device=call.device))
    before = subject.tried(as_recorded, where)
    if before is None or before.passes or before.is_cure_of(subject.own):
        return None
    by_score = score.argsort(descending=True, stable=True)
    control = partial(subject.tried, as_recorded, where)
    ordered = _alone(call, place, keys[by_score])
    after = subject.cured_by(partial(subject.tried, ordered, where), control, before)
    if after is None:
        return None
    # This order would also help a kernel that drops the keys with the smallest scores. With equal
    # scores, such a kernel would still be wrong.
    level = replace(as_recorded, query=torch.zeros_like(as_recorded.query))
    even = subject.cured_by(partial(subject.tried, level, where), control, before)
    if even is None:
        return None
    sink = int(score.argmax())
    earlier = float(score[:sink].max()) if sink else float("-inf")
    rise = float(score[sink]) - float(score[: min(sink, BLOCK) or 1].max())
    return Evidence(
        "late-sink",
        f"key {int(keys[sink]):,} has the largest score, {float(score[sink]):.4g}, "
        f"{rise:.3g} above the first {min(sink, BLOCK) or 1} keys; with the keys in the order of "
        f"their scores the row is right (error {before.error:.2g} → {after.error:.2g})",
        {
            "key": int(keys[sink]),
            "keys": len(keys),
            "largest_score": float(score[sink]),
            "largest_before_it": earlier if sink else None,
            "query": int(place.queries[0]),
            "error": before.error,
            "error_in_order": after.error,
            "error_with_equal_scores": even.error,
        },
        place,
    )


def _alone(call: AttentionCall, place: HeadRows, keys: Tensor) -> AttentionCall:
    """Return a call whose queries are all copies of one row and see `keys`, in this order.

    The call is not causal, and keeps only the numbers of an additive mask.
    """
    batch, head, rows = place
    count = call.shape.q_len
    repeated = rows.expand(count)
    mask = mask_of(call, batch, head, rows)
    added = None
    if mask is not None and mask.dtype != torch.bool and bool((mask[0, keys] != 0).any()):
        added = mask[:, keys][None, None].expand(
            call.shape.batch, call.shape.q_heads, count, len(keys)
        )
    return replace(
        call,
        query=call.query.index_select(2, repeated),
        key=call.key.index_select(2, keys),
        value=call.value.index_select(2, keys),
        attn_mask=added,
        output=None,
        is_causal=False,
        variant=AttentionVariant(softcap=call.variant.softcap),
    )
