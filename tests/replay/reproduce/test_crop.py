"""Parts of a call give the same output as the whole call, for every kind of call."""

from dataclasses import replace

import pytest
import torch

from capture.call.attention_call import AttentionCall
from capture.call.attention_variant import AttentionVariant
from capture.storage.header import CallHeader
from replay.accuracy.reference import attention
from replay.reproduce.crop import DERIVED, EXACT, Axis, storable
from tests.factories import normal, random_call
from tests.variant_calls import CALLS

SQUARE = {"q_len": 9, "kv_len": 9, "is_causal": True}
PLAIN = {
    "plain": random_call(batch=2, q_heads=4, kv_heads=2),
    "causal": random_call(**SQUARE),
    "causal, more keys": random_call(is_causal=True),
    "causal, more queries": random_call(q_len=13, kv_len=9, is_causal=True),
    "mask": random_call(batch=2, attn_mask=normal(2, 2, 9, 13)),
    "mask for all": random_call(batch=2, attn_mask=(normal(1, 1, 9, 13) > 0)),
    "padding": random_call(batch=2, attn_mask=(normal(2, 1, 1, 13) > 0)),
    "window to the right": random_call(variant=AttentionVariant(window=(2, 3))),
}
EVERY = {**PLAIN, **CALLS}

BY_NAME = {axis.name: axis for axis in EXACT}


@pytest.mark.parametrize("axis", EXACT, ids=lambda axis: axis.name)
@pytest.mark.parametrize("kind", EVERY)
def test_an_exact_part_returns_what_the_whole_did(kind: str, axis: Axis) -> None:
    call = EVERY[kind]
    call = call.with_tensors({"output": attention(call, torch.float64)})
    length = axis.length(call)
    for first in range(length):
        for end in range(first + 1, length + 1):
            part = axis.take(call, first, end)
            if part is None:
                continue
            assert axis.length(part) == end - first
            assert part.output is not None
            assert not (fault := CallHeader.of(part).fault()), fault
            torch.testing.assert_close(attention(part, torch.float64), part.output, equal_nan=True)


def taken(call: AttentionCall, axis: str) -> set[tuple[int, int]]:
    """Return the ranges of an axis that can be cropped."""
    length = BY_NAME[axis].length(call)
    ranges = [(first, end) for first in range(length) for end in range(first + 1, length + 1)]
    return {each for each in ranges if BY_NAME[axis].take(call, *each) is not None}


def test_causal_calls_have_the_expressible_parts() -> None:
    every = {(first, end) for first in range(9) for end in range(first + 1, 10)}
    assert taken(PLAIN["plain"], "queries") == every
    assert taken(PLAIN["causal"], "queries") == every
    last = BY_NAME["queries"].take(PLAIN["causal"], 6, 9)
    assert last.variant == AttentionVariant(bottom_right=True)
    assert last.features == ("bottom-right",)
    one = BY_NAME["queries"].take(PLAIN["causal"], 6, 7)
    assert (one.is_causal, one.features, one.shape.kv_len) == (False, (), 7)
    lengths = {(first, end) for first, end in every if end <= 3}
    ragged = random_call(batch=2, q_len=3, is_causal=True, seqused_k=torch.tensor([4, 13]).int())
    assert taken(ragged, "queries") == {each for each in lengths if each[0] == 0}


def test_nan_that_sdpa_passes_on_is_not_cropped() -> None:
    call = random_call(**SQUARE)
    call.key[0, 0, 7] = float("nan")
    assert BY_NAME["queries"].take(call, 0, 3) is None


def test_a_part_of_the_keys_has_no_output_and_fewer_keys_count() -> None:
    keys = DERIVED[0]
    call = CALLS["key-lengths"]
    call = call.with_tensors({"output": attention(call)})
    part = keys.take(call, 2, 8)
    assert part.output is None
    assert part.seqused_k.tolist() == [4, 6]
    assert torch.equal(part.key, call.key[:, :, 2:8])
    assert keys.length(CALLS["packed"]) == keys.length(CALLS["paged"]) == 1


def test_parts_keep_strides_unless_gaps_are_too_large() -> None:
    projected = normal(1, 9, 2, 3 * 32).transpose(1, 2)
    call = replace(random_call(), query=projected[..., :32])
    part = EXACT[1].take(call, 1, 2)
    assert part is not None
    assert storable(part).query.stride() == call.query.stride()
    vast = torch.empty_strided((1, 2, 9, 32), (2**34, 2**33, 2**29, 1), device="meta")
    assert storable(replace(random_call(), query=vast)).query.is_contiguous()
