"""Calls that the kernel may have computed instead of the given call.

No kernel runs here. The wrong output is compared with the references of calls that result from
misreading the recorded mask, scale or heads.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from capture.call.attention_call import AttentionCall
from capture.call.mask_structure import structure_of
from capture.call.per_head import SCALES
from replay.diagnosis.derived import (
    HeadRows,
    can_be_gathered,
    gathered,
    mask_of,
    part,
    scores,
    seen,
)
from replay.diagnosis.hypotheses.factors import wrong_factor
from replay.diagnosis.hypotheses.others import other_heads, other_sequences
from replay.diagnosis.subject import Evidence, Reading, Subject

MOST_MASKS = 256
"""Maximum number of heads whose masks are tried for another head."""


def misread(subject: Subject) -> Evidence | None:
    """Find the reading that explains the output."""
    if nothing_seen := _nothing_seen(subject):
        return nothing_seen
    for reading in readings(subject.call, subject.place):
        if not subject.computed(reading.call):
            continue
        if reading.cause == "causal-alignment" and _ignores_causal(subject):
            reading = Reading("mask-ignored", IGNORES_CAUSAL, reading.call)
        found = subject.score(subject.output, reading.call)
        numbers = {
            "error": subject.own.error,
            "error_of_this_reading": found.error,
            **_mask_numbers(subject),
        }
        return Evidence(reading.cause, reading.sentence, numbers)
    return _multiplied(subject) or wrong_factor(subject)


IGNORES_CAUSAL = "the output equals attention without the causal mask"


def readings(call: AttentionCall, place: HeadRows) -> Iterator[Reading]:
    """Yield calls that a kernel may have computed instead, the most common misreading first.

    Args:
        place: rows to compare; the masks of a reading are valid only for the head of these rows.
    """
    yield from _causal(call)
    yield from _features(call)
    if call.attn_mask is not None:
        yield from _of_mask(call, place)
    yield from other_heads(call)
    yield from other_sequences(call, place)


def _causal(call: AttentionCall) -> Iterator[Reading]:
    shape = call.shape
    corners = ("top left", "bottom right")
    if call.is_causal:
        bottom_right = call.variant.bottom_right
        if shape.q_len != shape.kv_len or call.features:
            variant = replace(call.variant, bottom_right=not bottom_right)
            yield Reading(
                "causal-alignment",
                f"the output equals that of a causal mask aligned {corners[not bottom_right]}, "
                f"where the call has it aligned {corners[bottom_right]}",
                replace(call, variant=variant),
            )
        # The other alignment comes first: with few queries, it may also mask no key.
        yield Reading("mask-ignored", IGNORES_CAUSAL, replace(call, is_causal=False))
        for shift, sees in ((1, "one key more than it may"), (-1, "one key fewer than it may")):
            yield Reading(
                "causal-alignment",
                f"the causal mask is shifted by one: each query sees {sees}",
                _with_diagonal(call, shift),
            )
    elif call.attn_mask is None and not call.features:
        for bottom_right in (False, True):
            aligned = replace(call.variant, bottom_right=bottom_right)
            other = replace(call, is_causal=True, variant=aligned)
            sentence = "the output is that of a causal mask, where the call has none"
            yield Reading("mask-misread", sentence, other)
    elif call.attn_mask is not None and shape.q_len not in (1, shape.kv_len) and not call.features:
        structure = structure_of(call)
        if structure is not None and structure.is_causal:
            variant = replace(call.variant, bottom_right=not structure.bottom_right)
            yield Reading(
                "causal-alignment",
                f"the mask is causal, aligned {corners[structure.bottom_right]}, and the output "
                f"equals that of one aligned {corners[not structure.bottom_right]}",
                replace(call, attn_mask=None, is_causal=True, variant=variant),
            )


def _with_diagonal(call: AttentionCall, shift: int) -> AttentionCall:
    """Return the causal call with each query seeing `shift` more keys."""
    window = (call.variant.window[0], shift)
    return replace(call, is_causal=False, variant=replace(call.variant, window=window))


def _ignores_causal(subject: Subject) -> bool:
    """Test whether the kernel is also wrong on a square causal call, which has only one alignment.

    With one query, a mask aligned bottom right masks no key, so it looks like an ignored mask.
    """
    call = subject.call
    if not call.is_causal or call.shape.q_len > 1 or not can_be_gathered(call):
        return False
    length = min(call.shape.kv_len, 64)
    rows = torch.arange(length, device=call.device)
    square = replace(gathered(call, queries=torch.zeros_like(rows), keys=rows), attn_mask=None)
    output = subject.run(square)
    place = subject.place._replace(queries=rows)
    if output is None or subject.score(output, square, place).passes:
        return False
    return subject.score(output, replace(square, is_causal=False), place).passes


def _features(call: AttentionCall) -> Iterator[Reading]:
    variant, equals = call.variant, "the output equals attention"
    if variant.window != (None, None):
        without = replace(call, variant=replace(variant, window=(None, None)))
        yield Reading("mask-ignored", f"{equals} without the window", without)
    if call.seqused_k is not None and call.page_table is None:
        sentence = f"{equals} to all keys, including those past the end of each sequence"
        yield Reading("mask-ignored", sentence, replace(call, seqused_k=None))
    if call.sinks is not None:
        yield Reading("unknown", f"{equals} without the sinks", replace(call, sinks=None))
    for name, scale in SCALES.items():
        if getattr(call, scale) is not None:
            stored = call.with_tensors({scale: torch.ones_like(getattr(call, scale))})
            yield Reading("unknown", f"{equals} without the {name}'s scale", stored)
    if variant.softcap is not None:
        without = replace(call, variant=replace(variant, softcap=None))
        yield Reading("unknown", f"{equals} without the soft cap", without)


def _of_mask(call: AttentionCall, place: HeadRows) -> Iterator[Reading]:
    shape = call.shape
    assert call.attn_mask is not None
    full = call.attn_mask.expand(shape.batch, shape.q_heads, shape.q_len, shape.kv_len)
    mask = full[place.batch, place.head]
    without = replace(call, attn_mask=None)
    yield Reading("mask-ignored", "the output equals attention without the mask", without)
    forms = _boolean_forms(mask) if mask.dtype == torch.bool else _additive_forms(mask)
    for sentence, misread_mask in itertools.chain(forms, _moved(mask), _of_others(full, place)):
        yield Reading("mask-misread", sentence, replace(call, attn_mask=misread_mask))
    # Kernels that mask only full blocks do not mask the last keys.
    for block in (256, 128, 64, 32, 16):
        end = shape.kv_len // block * block
        if 0 < end < shape.kv_len:
            shown = mask.clone()
            shown[:, end:] = True if mask.dtype == torch.bool else 0.0
            sentence = f"the mask is ignored from key {end:,} on"
            yield Reading("mask-ignored", sentence, replace(call, attn_mask=shown))


def _boolean_forms(mask: Tensor) -> Iterator[tuple[str, Tensor]]:
    yield "the mask is read inverted: True hides a key", ~mask
    yield "the boolean mask is added to the scores, as 1 and 0", mask.to(torch.float32)
    inverted = (~mask).to(torch.float32)
    yield "the boolean mask is added to the scores inverted, as 0 and 1", inverted
    first = torch.arange(mask.shape[1], device=mask.device) < mask.sum(1, keepdim=True)
    yield "the mask is read as a length: as many keys as it shows are read from the first on", first


def _additive_forms(mask: Tensor) -> Iterator[tuple[str, Tensor]]:
    yield "the additive mask is read as boolean: a key is visible where it is not 0", mask != 0
    yield "only the zeros of the additive mask are read, as visible keys", mask == 0
    yield "only the -inf of the additive mask are read, as hidden keys", mask != -torch.inf
    yield "only the positive numbers of the additive mask are read, as visible keys", mask > 0


def _moved(mask: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield misread forms of a head's mask (Sq, Sk): transposed, shifted, repeated, reversed."""
    q_len, kv_len = mask.shape
    if q_len == kv_len:
        yield "the mask is read transposed: queries for keys", mask.mT
    else:
        yield "the mask is read transposed: queries for keys", mask.reshape(kv_len, q_len).mT
        yield "the mask is read transposed: keys for queries", mask.mT.reshape(q_len, kv_len)
    for shift in (1, -1):
        by = "later" if shift > 0 else "earlier"
        for moved in _shifted(mask, shift, 1):
            yield f"the mask is read shifted by one key: it hides the key one {by}", moved
        for moved in _shifted(mask, -shift, 0):
            yield f"the mask is read shifted by one query, from the one {by}", moved
    if (difference := kv_len - q_len) not in (-1, 0, 1):
        for shift in (difference, -difference):
            yield f"the mask is read shifted by {shift} keys (Sk - Sq)", mask.roll(shift, 1)
    yield "the mask of the first query is read for all queries", mask[:1].expand_as(mask)
    yield "the mask of the last query is read for all queries", mask[-1:].expand_as(mask)
    yield "the mask of the first key is read for all keys", mask[:, :1].expand_as(mask)
    yield "the mask of the last key is read for all keys", mask[:, -1:].expand_as(mask)
    yield "the mask is read from the last key to the first", mask.flip(1)
    yield "the mask is read from the last query to the first", mask.flip(0)


def _of_others(full: Tensor, place: HeadRows) -> Iterator[tuple[str, Tensor]]:
    """Yield masks of other heads and batch elements, taken from all masks (B, Hq, Sq, Sk)."""
    batches, heads = full.shape[:2]
    # An expanded mask has the same values for all.
    others = itertools.product(
        range(batches) if full.stride(0) else [place.batch],
        range(heads) if full.stride(1) else [place.head],
    )
    for batch, head in itertools.islice(others, MOST_MASKS):
        if (batch, head) != place[:2]:
            where = f"batch element {batch}, head {head}" if batches > 1 else f"head {head}"
            yield f"the mask of {where} is read for head {place.head}", full[batch, head]


def _multiplied(subject: Subject) -> Evidence | None:
    """Test whether scores or weights are multiplied by a boolean mask."""
    mask = subject.call.attn_mask
    if mask is None or mask.dtype != torch.bool:
        return None
    batch, head, rows = subject.place
    shown = mask_of(subject.call, batch, head, rows)
    assert shown is not None
    small = part(replace(subject.call, attn_mask=None), subject.place).without_scales()
    found, value = scores(small), small.value[0, 0].to(torch.float64)
    if small.attn_mask is not None:
        found = found.masked_fill(~small.attn_mask[0, 0], -math.inf)
    zeroed, masked_after = found.masked_fill(~shown, 0.0).softmax(-1), found.softmax(-1) * shown
    for sentence, weights in (
        ("the scores are multiplied by the boolean mask: a hidden key scores 0", zeroed),
        ("the weights are multiplied by the boolean mask, and no longer sum to 1", masked_after),
    ):
        score = subject.returned(weights @ value)
        if score.explains(subject.own):
            numbers = {"error": subject.own.error, "error_of_this_reading": score.error}
            return Evidence("mask-misread", sentence, numbers)
    return None


def _shifted(mask: Tensor, shift: int, dim: int) -> Iterator[Tensor]:
    """Yield a mask with its entries moved along a dimension, with each possible edge.

    The edge left free gets the opposite edge's entry, its own entry, or a masked or visible entry.
    """
    rolled = mask.roll(shift, dim)
    yield rolled
    edge = 0 if shift > 0 else mask.shape[dim] - 1
    for value in (
        mask.select(dim, edge),
        *((0, 1) if mask.dtype == torch.bool else (-math.inf, 0)),
    ):
        moved = rolled.clone()
        moved.select(dim, edge).copy_(torch.as_tensor(value))
        yield moved


def _nothing_seen(subject: Subject) -> Evidence | None:
    """Test whether none of the wrong queries sees a key; their outputs should then be zero.

    A call without keys has no masked keys and allows no other reading.
    """
    call, (batch, head, rows) = subject.call.without_pages(), subject.place
    visible = seen(call, batch, rows)
    mask = mask_of(call, batch, head, rows)
    if mask is not None:
        visible = visible & (mask if mask.dtype == torch.bool else mask != -torch.inf)
    if bool(visible.any(dim=1).any()):
        return None
    given = subject.output[batch, head, rows]
    what = "NaN" if bool(given.isnan().all()) else "something else"
    if not call.shape.kv_len:
        return Evidence(
            "unknown",
            f"the call has no keys, and queries get {what}, where SDPA returns zeros",
            {"queries": len(rows)},
        )
    return Evidence(
        "mask-misread",
        f"queries whose keys are all masked get {what}, where SDPA returns zeros; the other "
        "queries are right",
        {"queries": len(rows)},
    )


def _mask_numbers(subject: Subject) -> dict[str, Any]:
    call, (batch, head, rows) = subject.call, subject.place
    if call.attn_mask is None:
        return {}
    mask = mask_of(call, batch, head, rows)
    assert mask is not None
    hidden = ~mask if mask.dtype == torch.bool else mask == -torch.inf
    kind = "bool" if mask.dtype == torch.bool else "additive"
    return {"mask": kind, "hidden_share": float(hidden.double().mean())}
