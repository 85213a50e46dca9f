"""Numbers of keys, queries, heads or sequences beyond which a kernel is wrong."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from capture.call.attention_call import AttentionCall
from capture.call.per_head import numbers_of_heads
from capture.call.strides import picked
from replay.diagnosis.derived import can_be_gathered, gathered
from replay.diagnosis.hypotheses.others import of_other_sequences
from replay.diagnosis.subject import MOST_ROWS, Evidence, Score, Subject

FEWEST_KEYS = 8
"""Least limit on keys, because any weights of few keys are nearly right."""

Resized = Callable[[int, bool], "Score | None"]
"""Function that runs the call with a number of keys, queries …, and scores its last rows.

The flag chooses other entries, which shows that the number is the cause and not an entry.
"""


def too_large(subject: Subject) -> Evidence | None:
    """Search for the number of sequences, heads, queries or keys at which the error begins."""
    call, shape = subject.call, subject.call.shape
    sizes: dict[str, tuple[int, Resized]]
    if call.page_table is not None and call.seqused_k is not None:
        if call.cu_seqlens_q is not None or call.attn_mask is not None:
            return None
        used = int(call.seqused_k[subject.place.batch])
        return _too_large(subject, {"keys": (used, partial(_with_pages, subject))})
    if not can_be_gathered(call) or call.value_is_in_key:
        return None
    sizes = {
        "sequences": (shape.batch, partial(_with_sequences, subject)),
        "key heads": (shape.kv_heads, partial(_with_heads, subject)),
        "queries": (shape.q_len, partial(_with_queries, subject)),
        "keys": (shape.kv_len, partial(_with_keys, subject)),
    }
    return _too_large(subject, sizes)


def smallest(call: AttentionCall) -> AttentionCall:
    """Return the call with one query, one key head, one sequence and `FEWEST_KEYS` keys."""
    shape, device = call.shape, call.device
    first = torch.zeros(1, dtype=torch.int64, device=device)
    group = torch.arange(shape.q_heads // shape.kv_heads, device=device)
    call = _chosen(call, dict.fromkeys(("query", "key", "value"), first), 0)
    call = _chosen(call, {"query": group, "key": first, "value": first}, 1)
    keys = torch.arange(min(FEWEST_KEYS, shape.kv_len), device=device)
    return gathered(call, queries=first, keys=keys)


def _too_large(subject: Subject, sizes: dict[str, tuple[int, Resized]]) -> Evidence | None:
    for name, (size, resized) in sizes.items():
        limit = _limit(subject, size, FEWEST_KEYS if name == "keys" else 1, resized)
        if limit is None:
            continue
        if name == "sequences" and limit == 1 and (found := of_other_sequences(subject)):
            return found
        one = name.removesuffix("s") if limit == 1 else name
        return Evidence(
            "too-large",
            f"it {subject.fault} from {limit + 1:,} {name} on, and is right with {limit:,} {one}",
            {"of": name, "limit": limit, "given": size, "error": subject.own.error},
        )
    return None


def _limit(subject: Subject, size: int, least: int, resized: Resized) -> int | None:
    """Return the largest number that is right; None if the number is not the cause."""

    def is_wrong(number: int, others: bool = False) -> bool:
        score = resized(number, others)
        return score is not None and not score.passes

    def is_right(number: int) -> bool:
        score = resized(number, False)
        return score is not None and score.passes

    right = size // 2
    while right >= least and not is_right(right):
        right //= 2
    if right < least or not is_wrong(size) or not is_wrong(size + max(1, size // 4)):
        return None
    wrong = size
    while wrong - right > 1:
        middle = (right + wrong) // 2
        right, wrong = (middle, wrong) if is_right(middle) else (right, middle)
    for others in (False, True):
        # One entry too many may change little, so more are added until the output is wrong.
        numbers = [min(size, right + 2**power) for power in range((size - right).bit_length() + 1)]
        large = next(
            (partial(resized, each, others) for each in numbers if is_wrong(each, others)), None
        )
        before = None if large is None else large()
        if large is None or before is None:
            return None
        small = partial(resized, right, others)
        if not subject.cured_by(small, large, before):
            return None
    return right


def _indices(length: int, number: int, others: bool, device: torch.device) -> Tensor:
    """Return the last `number` indices, or the first; they are repeated if there are too few."""
    index = torch.arange(number, device=device)
    return index % length if others else (index - number) % length


def _with_keys(subject: Subject, number: int, others: bool) -> Score | None:
    call = subject.call
    keys = _indices(call.shape.kv_len, number, others, call.device)
    return subject.tried(gathered(call, keys=keys))


def _with_pages(subject: Subject, number: int, others: bool) -> Score | None:
    """Run the wrong sequence of a paged call with a number of keys, in pages that may repeat."""
    call, place = subject.call, subject.place
    assert call.page_table is not None
    assert call.seqused_k is not None
    size, of_sequence = call.key.shape[2], slice(place.batch, place.batch + 1)
    used = math.ceil(int(call.seqused_k[place.batch]) / size)
    index = _indices(used, math.ceil(number / size), others, call.device)
    alone = replace(
        call.with_tensors({"query": call.query[of_sequence]}),
        page_table=call.page_table[of_sequence, :used][:, index.to(call.page_table.device)],
        seqused_k=torch.full_like(call.seqused_k[of_sequence], number),
        output=None,
    )
    return subject.tried(alone, place._replace(batch=0))


def _with_queries(subject: Subject, number: int, others: bool) -> Score | None:
    call = subject.call
    queries = _indices(call.shape.q_len, number, others, call.device)
    first = max(0, number - MOST_ROWS // 2)
    last = torch.arange(first, number, device=call.device)
    score = subject.tried(gathered(call, queries=queries), subject.place._replace(queries=last))
    return None if score is None else Score(score.passes, score.worst)


def _with_sequences(subject: Subject, number: int, others: bool) -> Score | None:
    """Run the call with the wrong sequence as the last of a number of sequences."""
    place = subject.place
    index = _before(subject.call.shape.batch, place.batch, number, others, subject.call.device)
    call = _chosen(subject.call, {"query": index, "key": index, "value": index}, 0)
    return subject.tried(call, place._replace(batch=number - 1))


def _with_heads(subject: Subject, number: int, others: bool) -> Score | None:
    """Run the call with the wrong head in the last of a number of groups."""
    place, shape, device = subject.place, subject.call.shape, subject.call.device
    group = shape.q_heads // shape.kv_heads
    index = _before(shape.kv_heads, place.head // group, number, others, device)
    queries = (index[:, None] * group + torch.arange(group, device=device)).flatten()
    call = _chosen(subject.call, {"query": queries, "key": index, "value": index}, 1)
    return subject.tried(call, place._replace(head=(number - 1) * group + place.head % group))


def _before(length: int, own: int, number: int, others: bool, device: torch.device) -> Tensor:
    """Return `number` indices that end with `own`; the rest are repeated if there are too few."""
    rest = [index for index in range(length) if index != own] or [own]
    if others:
        rest.reverse()
    found = [rest[at % len(rest)] for at in range(number - 1)]
    return torch.tensor([*found, own], device=device)


def _chosen(call: AttentionCall, indices: dict[str, Tensor], dim: int) -> AttentionCall:
    """Return the call with some sequences (dim 0) or heads (dim 1)."""
    found = {name: picked(getattr(call, name), dim, index) for name, index in indices.items()}
    mask = call.attn_mask
    if mask is not None and (at := dim + mask.ndim - 4) >= 0 and mask.shape[at] > 1:
        found["attn_mask"] = picked(mask, at, indices["query"])
    if dim == 1:
        found |= numbers_of_heads(call.tensors(), indices["query"], indices["key"])
    return replace(call.with_tensors(found), output=None)
