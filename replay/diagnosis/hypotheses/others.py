"""Heads and sequences that a kernel takes for others, and numbers of heads that it confuses."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from capture.call.attention_call import AttentionCall
from capture.call.per_head import numbers_of_heads
from capture.text.counted import counted
from replay.accuracy.reference import attention
from replay.diagnosis.derived import HeadRows, can_be_gathered, mapped, part
from replay.diagnosis.subject import COLLAPSE, Evidence, Reading, Subject

MOST_SEQUENCES = 16
"""Maximum number of other sequences whose keys and values are tried."""

TAKEN = (("query", "key", "value"), ("key", "value"), ("key",), ("value",))
"""Tensors that a kernel may take from another sequence."""


def other_heads(call: AttentionCall) -> Iterator[Reading]:
    """Yield calls whose query heads get other key heads."""
    shape = call.shape
    if call.page_table is not None or shape.q_heads == 1:
        return
    heads = torch.arange(shape.q_heads, device=call.device)
    to_kv = heads // (shape.q_heads // shape.kv_heads)
    maps = {}
    if shape.kv_heads not in (1, shape.q_heads):
        maps["key head h mod Hkv instead of h // (Hq / Hkv)"] = heads % shape.kv_heads
    maps["the key heads of one query before"] = to_kv.roll(1)
    maps["the key heads in reverse"] = to_kv.flip(0)
    if shape.kv_heads > 1:
        maps["the first key head for all"] = torch.zeros_like(heads)
    for name, places in maps.items():
        key, value = (each.index_select(1, places) for each in (call.key, call.value))
        other = replace(call, key=key, value=value, enable_gqa=False)
        other = other.with_tensors(numbers_of_heads(call.tensors(), heads, places))
        if call.query_scale is not None:
            other = replace(other, query_scale=call.query_scale[to_kv])
        yield Reading("head-mapping", f"the output is that of {name}", other)


def other_sequences(call: AttentionCall, place: HeadRows) -> Iterator[Reading]:
    """Yield calls in which the sequence of these rows gets tensors of others.

    Only the sequence and the head of `place` are valid in them.
    """
    batch, head, _ = place
    shape = call.shape
    if call.cu_seqlens_q is not None and call.cu_seqlens_q.shape[0] > 2:
        yield from _joined(call)
    if shape.batch == 1 or not can_be_gathered(call):
        return

    def taken(names: tuple[str, ...], sequence: int, kv_head: int | None = None) -> AttentionCall:
        found: dict[str, Tensor] = {}
        for name in (*names, *(["attn_mask"] if "query" in names else [])):
            tensor = getattr(call, name)
            if tensor is not None and tensor.ndim == 4 and tensor.shape[0] > 1:
                one = tensor[sequence : sequence + 1]
                one = one if kv_head is None else one[:, kv_head : kv_head + 1]
                found[name] = one.expand_as(tensor)
        return replace(call.with_tensors(found), output=None)

    others = [each for each in range(shape.batch) if each != batch][:MOST_SEQUENCES]
    for names in TAKEN:
        for other in others:
            what = " and ".join([*filter(None, [", ".join(names[:-1])]), names[-1]])
            sentence = f"sequence {batch} of the batch gets the {what} of sequence {other}"
            yield Reading("other-sequence", sentence, taken(names, other))
    index = batch * shape.kv_heads + head // (shape.q_heads // shape.kv_heads)
    swapped = taken(("key", "value"), index % shape.batch, index // shape.batch)
    yield Reading("other-sequence", "keys of batch and heads are read in swapped order", swapped)
    if call.attn_mask is None and not call.is_causal and not call.features:
        key, value = (
            each.transpose(0, 1).flatten(1, 2)[None].expand(shape.batch, -1, -1, -1)
            for each in (call.key, call.value)
        )
        joined = replace(call, key=key, value=value, output=None)
        yield Reading("other-sequence", "queries also see the keys of other sequences", joined)


def _joined(call: AttentionCall) -> Iterator[Reading]:
    """Yield a packed call as one sequence."""
    if call.page_table is not None or call.cu_seqlens_k is None:
        return
    ends = {
        name: torch.tensor([0, length], dtype=torch.int32, device=call.device)
        for name, length in (
            ("cu_seqlens_q", call.shape.q_len),
            ("cu_seqlens_k", call.shape.kv_len),
        )
    }
    joined = replace(call.with_tensors(ends), seqused_k=None, output=None)
    sentence = "queries also see the keys of other sequences: the packed call is read as one"
    yield Reading("other-sequence", sentence, joined)


def of_other_sequences(subject: Subject) -> Evidence | None:
    """Test whether the wrong rows change with the keys and values of other sequences.

    Their signs are flipped, which keeps their magnitudes. The unchanged call must then give the
    wrong rows again.
    """
    call, (batch, head, rows) = subject.call, subject.place
    if call.page_table is not None or call.value_is_in_key:
        return None
    others = torch.ones(call.shape.batch, 1, call.shape.kv_len, 1, dtype=torch.bool)
    number = batch
    if call.cu_seqlens_q is not None and call.cu_seqlens_k is not None:
        sequence_of = torch.bucketize(rows, call.cu_seqlens_q[1:].to(rows), right=True)
        number = int(sequence_of.mode().values)
        rows = rows[sequence_of == number]
        others[:, :, call.cu_seqlens_k[number] : call.cu_seqlens_k[number + 1]] = False
    else:
        others[batch] = False
    others = others.to(call.device)
    turned = {name: getattr(call, name) for name in ("key", "value")}
    turned = {
        name: torch.where(others, mapped(each, torch.neg), each) for name, each in turned.items()
    }
    given, again = subject.run(replace(call.with_tensors(turned), output=None)), subject.run(call)
    if given is None or again is None:
        return None
    expected = attention(part(call, HeadRows(batch, head, rows)))[0, 0]
    wrong, moved, repeated = (
        each[batch, head, rows].to(expected) for each in (subject.output, given, again)
    )
    error, by_others, drift = (
        float(torch.linalg.vector_norm(wrong - each)) for each in (expected, moved, repeated)
    )
    if not drift * COLLAPSE < by_others < math.inf or not error <= by_others * COLLAPSE:
        return None
    return Evidence(
        "other-sequence",
        f"the output of sequence {number} changes with the keys and values of other sequences",
        {"sequence": number, "error": subject.own.error, "change_over_error": by_others / error},
    )


def kv_heads(subject: Subject) -> Evidence | None:
    """Test whether the error disappears when each query head has key heads of its own."""
    call, shape = subject.call, subject.call.shape
    if shape.kv_heads == shape.q_heads or call.page_table is not None:
        return None
    group = shape.q_heads // shape.kv_heads
    of_queries = torch.arange(shape.kv_heads, device=call.device).repeat_interleave(group)
    repeated = {
        "key": call.key.repeat_interleave(group, dim=1),
        "value": call.value.repeat_interleave(group, dim=1),
        **numbers_of_heads(call.tensors(), slice(None), of_queries),
    }
    score = subject.cured_by(replace(call.with_tensors(repeated), enable_gqa=False, output=None))
    if score is None:
        return None
    return Evidence(
        "kv-heads",
        f"it {subject.fault} with {counted(shape.kv_heads, 'key head')} for {shape.q_heads} query "
        f"heads, and is right when each key head is repeated {group} times",
        {
            "kv_heads": shape.kv_heads,
            "q_heads": shape.q_heads,
            "error": subject.own.error,
            "error_with_repeated_heads": score.error,
        },
    )
