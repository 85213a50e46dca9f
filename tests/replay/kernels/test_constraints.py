"""Sentences of all constraints, and masks that count as padding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from capture.call.attention_call import AttentionCall
from replay.kernels import constraints
from replay.kernels.constraints import (
    Constraint,
    all_of,
    dtypes,
    head_dim_multiple_of,
    head_dims,
    key_range,
    max_head_dim,
    max_queries,
    min_length,
)

MakeCall = Callable[..., AttentionCall]
ANY_MASK = torch.rand(9, 13) < 0.5

CASES: list[tuple[Constraint, dict[str, Any], str | None]] = [
    (constraints.no_dropout, {}, None),
    (
        constraints.no_dropout,
        {"dropout_p": 0.1},
        "dropout makes the output random, so it cannot be judged",
    ),
    (constraints.no_mask, {}, None),
    (constraints.no_mask, {"attn_mask": ANY_MASK}, "takes no attn_mask"),
    (constraints.no_causal, {}, None),
    (constraints.no_causal, {"is_causal": True}, "takes no is_causal"),
    (constraints.mask_or_causal, {"is_causal": True}, None),
    (constraints.mask_or_causal, {"attn_mask": ANY_MASK}, None),
    (
        constraints.mask_or_causal,
        {"attn_mask": ANY_MASK, "is_causal": True},
        "attn_mask and is_causal together",
    ),
    (constraints.bool_mask_only, {"attn_mask": ANY_MASK}, None),
    (
        constraints.bool_mask_only,
        {"attn_mask": torch.zeros(9, 13)},
        "takes a bool attn_mask only, not float32",
    ),
    (constraints.mask_shared_by_heads, {}, None),
    (constraints.mask_shared_by_heads, {"attn_mask": ANY_MASK}, None),
    (constraints.mask_shared_by_heads, {"attn_mask": ANY_MASK.expand(1, 2, 9, 13)}, None),
    (
        constraints.mask_shared_by_heads,
        {"attn_mask": torch.rand(2, 9, 13) < 0.5},
        "takes one attn_mask for all heads",
    ),
    (constraints.causal_only_square, {"is_causal": True, "kv_len": 9}, None),
    (constraints.causal_only_square, {}, None),
    (
        constraints.causal_only_square,
        {"is_causal": True},
        "causal with 9 queries and 13 keys: the kernel aligns it bottom right, SDPA top left",
    ),
    (constraints.no_gqa, {}, None),
    (
        constraints.no_gqa,
        {"q_heads": 6, "kv_heads": 2},
        "6 query heads over 2 key heads: needs equal numbers",
    ),
    (constraints.decode_only, {"q_len": 1}, None),
    (constraints.decode_only, {}, "decode only: one query per sequence, not 9"),
    (max_queries(9), {}, None),
    (max_queries(8), {}, "decode only: at most 8 queries per sequence, not 9"),
    (constraints.default_scale, {}, None),
    (constraints.default_scale, {"scale": 32**-0.5}, None),
    (
        constraints.default_scale,
        {"scale": 0.125},
        "takes no scale: always 1/sqrt(head_dim), not 0.125",
    ),
    (constraints.same_value_dim, {}, None),
    (constraints.no_negative_scale, {"scale": 0.0}, None),
    (constraints.no_negative_scale, {"scale": -0.5}, "scale -0.5: must not be negative"),
    (
        constraints.same_value_dim,
        {"v_head_dim": 16},
        "value head_dim 16 differs from query head_dim 32",
    ),
    (head_dims(32, 64), {}, None),
    (head_dims(64), {}, "head_dim 32: needs 64"),
    (head_dims(64, 128), {}, "head_dim 32: needs 64 or 128"),
    (head_dims(64, 96, 128), {}, "head_dim 32: needs 64, 96 or 128"),
    (max_head_dim(32), {}, None),
    (max_head_dim(24), {}, "head_dim 32: at most 24"),
    (max_head_dim(32), {"v_head_dim": 40}, "head_dim 40: at most 32"),
    (constraints.multiple_of_8, {}, None),
    (constraints.multiple_of_8, {"v_head_dim": 20}, "head_dim 20: needs a multiple of 8"),
    (head_dim_multiple_of(64), {}, "head_dim 32: needs a multiple of 64"),
    (min_length(9), {}, None),
    (min_length(10), {}, "length 9: at least 10"),
    (min_length(10), {"q_len": 20, "kv_len": 3}, "length 3: at least 10"),
    (dtypes(torch.float32), {}, None),
    (dtypes(torch.float16), {}, "dtype float32: needs float16"),
    (
        constraints.up_to_float32,
        {"dtype": torch.float64},
        "dtype float64: needs float16, bfloat16 or float32",
    ),
    (constraints.half_precision, {}, "dtype float32: needs float16 or bfloat16"),
    (constraints.half_precision, {"dtype": torch.bfloat16}, None),
    (constraints.adjacent_elements, {}, None),
    (constraints.padding_mask_only, {}, None),
    (constraints.padding_mask_only, {"attn_mask": torch.arange(13) < 5}, None),
    (
        constraints.padding_mask_only,
        {"attn_mask": torch.zeros(9, 13)},
        "takes a bool padding mask only, not float32",
    ),
    (
        constraints.padding_mask_only,
        {"attn_mask": ANY_MASK},
        "takes a padding mask only: the same for all heads and queries, "
        "and masking keys before or after the others",
    ),
    (constraints.needs_mask, {"attn_mask": ANY_MASK}, None),
    (constraints.needs_mask, {}, "for padded batches: this call has no attn_mask"),
]


@pytest.mark.parametrize(("constraint", "fields", "sentence"), CASES)
def test_sentences(
    make_call: MakeCall, constraint: Constraint, fields: dict[str, Any], sentence: str | None
) -> None:
    assert constraint(make_call(**fields)) == sentence


@pytest.mark.parametrize("name", ["key", "value"])
def test_one_dtype_for_all(make_call: MakeCall, name: str) -> None:
    """A 16-bit query over an 8-bit cache, for instance."""
    call = make_call(dtype=torch.float16)
    call = call.with_tensors({name: call.tensors()[name].to(torch.float8_e4m3fn)})
    reason = constraints.half_precision(call)
    assert reason is not None
    assert reason.endswith("needs one dtype")
    assert "float16" in reason
    assert "float8_e4m3fn" in reason


def test_elements_apart(make_call: MakeCall) -> None:
    call = make_call()
    call = call.with_tensors({"key": call.key.mT.contiguous().mT})
    assert constraints.adjacent_elements(call) == (
        "the elements of a head lie 13 apart in the key: must be adjacent"
    )


def test_all_of_returns_the_first_reason(make_call: MakeCall) -> None:
    both = all_of(constraints.no_dropout, constraints.no_mask, constraints.decode_only)
    assert both(make_call(attn_mask=ANY_MASK)) == "takes no attn_mask"
    assert both(make_call()) == "decode only: one query per sequence, not 9"
    assert both(make_call(q_len=1)) is None
    assert all_of()(make_call()) is None


def rows(*patterns: str) -> Tensor:
    """A mask (B, 1, 1, Sk): `##..` is two keys and two of padding."""
    return torch.tensor([[[[mark == "#" for mark in pattern]]] for pattern in patterns])


@pytest.mark.parametrize(
    ("mask", "lengths", "starts"),
    [
        (rows("##..", "####"), [2, 4], [0, 0]),
        (rows("..##", "####"), [2, 4], [2, 0]),
        (rows("#...", "...#"), [1, 1], [0, 3]),
        (rows("##.."), [2, 2], [0, 0]),
        (rows("##..", ".###").expand(2, 1, 5, 4), [2, 3], [0, 1]),
        (rows("##..", ".###").repeat(1, 3, 5, 1), [2, 3], [0, 1]),
        (rows("##..")[0, 0, 0], [2, 2], [0, 0]),
        (rows("##..")[0], [2, 2], [0, 0]),
    ],
)
def test_padding_masks(mask: Tensor, lengths: list[int], starts: list[int]) -> None:
    found = key_range(mask, 2, 4)
    assert found is not None
    assert found.lengths.tolist() == lengths
    assert found.starts.tolist() == starts
    assert found.lengths.dtype == found.starts.dtype == torch.int32
    assert found.keys.shape == (2, 4)
    assert torch.equal(found.keys, mask.expand(2, 3, 5, 4)[:, 0, 0])


@pytest.mark.parametrize(
    "mask",
    [
        rows("#.##", "####"),
        rows(".##.", "####"),
        rows("....", "####"),
        rows("##..", "####").float(),
        torch.ones(5, 4, dtype=torch.bool).tril(),
        torch.cat([rows("##..", "####"), rows("#...", "####")], dim=1),
        torch.cat([rows("##..", "####"), rows("#...", "####")], dim=2),
    ],
)
def test_other_masks(mask: Tensor) -> None:
    assert key_range(mask, 2, 4) is None
