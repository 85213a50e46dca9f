"""A call is unchanged after it is split into the parts of ranks and joined again."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from capture.call.attention_call import AttentionCall
from capture.call.attention_variant import AttentionVariant
from capture.call.joining import JoinError, join
from capture.call.strides import concatenated
from capture.recording.heads import pick
from tests.factories import bits, normal, random_call
from tests.variant_calls import in_float8


def heads_of(call: AttentionCall, *parts: tuple[Sequence[int], Sequence[int]]) -> list[Any]:
    """Return parts of a call; each part has the given query heads and key/value heads."""
    return [pick(call, heads, kv_heads) for heads, kv_heads in parts]


def queries_of(call: AttentionCall, *ends: int) -> list[AttentionCall]:
    """Return a call in parts that end at these query positions."""
    parts = []
    for first, end in zip((0, *ends), ends, strict=False):
        mask = call.attn_mask
        cut = None if mask is None or mask.shape[2] == 1 else mask[:, :, first:end]
        parts.append(
            replace(
                call,
                query=call.query[:, :, first:end],
                output=call.output[:, :, first:end],
                attn_mask=mask if cut is None else cut,
            )
        )
    return parts


def is_same(joined: AttentionCall, call: AttentionCall) -> bool:
    ours, theirs = joined.tensors(), call.tensors()
    return (
        ours.keys() == theirs.keys()
        and all(torch.equal(bits(ours[name]), bits(theirs[name])) for name in ours)
        and replace(joined, **dict.fromkeys(ours)) == replace(call, **dict.fromkeys(ours))
    )


GROUPED = random_call(q_heads=4, kv_heads=2)
HALVES = [([0, 1], [0, 1]), ([2, 3], [2, 3])]


@pytest.mark.parametrize(
    ("call", "parts"),
    [
        (random_call(q_heads=4, with_output=True), HALVES),
        (random_call(q_heads=4, is_causal=True, scale=0.5), HALVES),
        (random_call(q_heads=4, dtype=torch.bfloat16), [([0], [0]), ([1, 2, 3], [1, 2, 3])]),
        (random_call(q_heads=8, kv_heads=4), [([0, 1, 2, 3], [0, 1]), ([4, 5, 6, 7], [2, 3])]),
        (GROUPED, [([0, 1], [0]), ([2, 3], [1])]),
        (random_call(q_heads=4, kv_heads=1), [([0, 1], [0]), ([2, 3], [0])]),
        (random_call(q_heads=4, kv_heads=1), [([0], [0]), ([1, 2, 3], [0])]),
        (in_float8(GROUPED, "query", "key"), [([each], [each // 2]) for each in range(4)]),
        (random_call(q_heads=4, attn_mask=normal(1, 4, 9, 13)), HALVES),
        (random_call(q_heads=4, attn_mask=normal(1, 1, 9, 13)), HALVES),
        (random_call(q_heads=2, attn_mask=normal(1, 2, 9, 13)), [([0], [0]), ([1], [1])]),
        (random_call(q_heads=4, sinks=normal(4), variant=AttentionVariant(softcap=3.0)), HALVES),
        (random_call(q_heads=4, seqused_k=torch.tensor([7], dtype=torch.int32)), HALVES),
    ],
    ids=str,
)
def test_heads(call: AttentionCall, parts: list[tuple[list[int], list[int]]]) -> None:
    joined = join(heads_of(call, *parts), "heads")
    assert is_same(joined, call)


def test_query_heads_that_share_a_key_head_are_grouped() -> None:
    """Each part has as many query heads as key heads, so it does not set `enable_gqa`."""
    call = random_call(q_heads=2, kv_heads=1)
    parts = [replace(each, enable_gqa=False) for each in heads_of(call, ([0], [0]), ([1], [0]))]
    assert is_same(join(parts, "heads"), call)


@pytest.mark.parametrize(
    "mask", [None, normal(1, 1, 9, 13), normal(1, 2, 9, 13), normal(1, 1, 1, 13)], ids=str
)
@pytest.mark.parametrize("ends", [(4, 9), (1, 9), (3, 6, 9)], ids=str)
def test_queries(mask: Tensor | None, ends: tuple[int, ...]) -> None:
    call = random_call(with_output=True, attn_mask=mask)
    assert is_same(join(queries_of(call, *ends), "queries"), call)


def test_joined_value_stays_part_of_the_key() -> None:
    key = normal(1, 1, 13, 32)
    call = replace(random_call(q_heads=4, kv_heads=1), key=key, value=key[..., :24])
    joined = join(heads_of(call, ([0, 1], [0]), ([2, 3], [0])), "heads")
    assert joined.value_is_in_key
    assert is_same(joined, call)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"is_causal": True}, "differ in is_causal"),
        ({"scale": 0.25}, "differ in scale"),
        ({"output": normal(1, 2, 9, 32)}, "only some ranks have output"),
        ({"attn_mask": normal(1, 1, 9, 13)}, "only some ranks have attn_mask"),
        ({"value": normal(1, 2, 13, 32, dtype=torch.float16)}, "differ in the dtype of value"),
        ({"query": normal(1, 2, 8, 32)}, r"query of shapes \(1, 2, 9, 32\) and \(1, 2, 8, 32\)"),
        ({"key": normal(1, 1, 13, 32), "value": normal(1, 1, 13, 32)}, "different numbers of"),
    ],
)
def test_parts_of_different_calls_are_refused(change: dict[str, Any], reason: str) -> None:
    first, second = heads_of(random_call(q_heads=4), *HALVES)
    with pytest.raises(JoinError, match=reason):
        join([first, replace(second, **change)], "heads")


def test_masks_of_different_kinds_are_refused() -> None:
    first, second = (random_call(attn_mask=normal(1, heads, 9, 13, seed=heads)) for heads in (1, 2))
    with pytest.raises(JoinError, match="a mask for all heads or queries"):
        join([first, second], "heads")


def test_lengths_that_differ_are_refused() -> None:
    parts = [random_call(seqused_k=torch.tensor([length], dtype=torch.int32)) for length in (5, 6)]
    with pytest.raises(JoinError, match="differ in the values of seqused_k"):
        join(parts, "heads")


def test_queries_need_the_same_keys() -> None:
    with pytest.raises(JoinError, match="differ in the values of key"):
        join([random_call(seed=0), random_call(seed=1)], "queries")


@pytest.mark.parametrize(
    "asked",
    [{"is_causal": True}, {"variant": AttentionVariant(window=(4, 0))}, {"sinks": normal(2)}],
    ids=str,
)
def test_options_relative_to_a_part_are_refused(asked: dict[str, Any]) -> None:
    call = random_call(with_output=True)
    parts = [replace(each, **asked) for each in queries_of(call, 4, 9)]
    with pytest.raises(JoinError, match="of a part, not of the whole call"):
        join(parts, "queries")


def strided(size: Sequence[int], order: Sequence[int], expanded: Sequence[int] = ()) -> Tensor:
    """Return a tensor whose dimensions have this order in memory."""
    memory = normal(*(1 if dim in expanded else size[dim] for dim in order))
    return memory.permute([order.index(dim) for dim in range(4)]).expand(*size)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3)])
@pytest.mark.parametrize("cut", [1, 2])
@pytest.mark.parametrize("expanded", [(), (0,)])
def test_strides_of_the_whole(order: tuple[int, ...], cut: int, expanded: tuple[int, ...]) -> None:
    """Parts are dense, as each rank has its own memory; joining restores the original strides."""
    whole = strided((3, 4, 5, 8), order, expanded)
    parts = []
    for part in (whole[:, :cut], whole[:, cut:]):
        own = strided(part.shape, order, expanded)
        own[: 1 if expanded else None].copy_(part[: 1 if expanded else None])
        parts.append(own)
    joined = concatenated(parts, 1)
    assert torch.equal(joined, whole)
    assert joined.stride() == whole.stride()
