"""Constraints refuse calls with a reason, and some masks count as padding."""

from typing import Any

import pytest
import torch
from torch import Tensor

from replay.kernels import constraints
from replay.kernels.constraints import (
    Constraint,
    head_dims,
    key_range,
    max_head_dim,
    max_queries,
    min_length,
)
from tests.factories import random_call

ANY_MASK = torch.rand(9, 13) < 0.5

# Tests of adapters check the sentences of other constraints.
REFUSED: list[tuple[Constraint, dict[str, Any], str]] = [
    (max_queries(8), {}, "decode only: at most 8 queries per sequence, not 9"),
    (constraints.no_negative_scale, {"scale": -0.5}, "scale -0.5: must not be negative"),
    (head_dims(64), {}, "head_dim 32: needs 64"),
    (head_dims(64, 96, 128), {}, "head_dim 32: needs 64, 96 or 128"),
    (max_head_dim(32), {"v_head_dim": 40}, "head_dim 40: at most 32"),
    (constraints.multiple_of_8, {"v_head_dim": 20}, "head_dim 20: needs a multiple of 8"),
    (min_length(10), {"q_len": 20, "kv_len": 3}, "length 3: at least 10"),
]
ALLOWED: list[tuple[Constraint, dict[str, Any]]] = [
    (constraints.mask_or_causal, {"attn_mask": ANY_MASK}),
    (constraints.mask_shared_by_heads, {"attn_mask": ANY_MASK}),
    (constraints.mask_shared_by_heads, {"attn_mask": ANY_MASK.expand(1, 2, 9, 13)}),
    (max_queries(9), {}),
    (constraints.default_scale, {"scale": 32**-0.5}),
    (constraints.no_negative_scale, {"scale": 0.0}),
    (max_head_dim(32), {}),
    (min_length(9), {}),
    (constraints.padding_mask_only, {"attn_mask": torch.arange(13) < 5}),
]


def test_refusals_give_a_reason() -> None:
    for constraint, fields, sentence in REFUSED:
        assert sentence in str(constraint(random_call(**fields)))


def test_calls_at_the_limit_are_allowed() -> None:
    for constraint, fields in ALLOWED:
        assert constraint(random_call(**fields)) is None


@pytest.mark.parametrize("name", ["key", "value"])
def test_call_of_two_dtypes_is_refused(name: str) -> None:
    """A call may have, for instance, a 16-bit query and an 8-bit cache."""
    call = random_call(dtype=torch.float16)
    call = call.with_tensors({name: call.tensors()[name].to(torch.float8_e4m3fn)})
    reason = constraints.half_precision(call)
    assert reason.endswith("needs one dtype")
    assert "float16" in reason
    assert "float8_e4m3fn" in reason


def rows(*patterns: str) -> Tensor:
    """Return a mask (B, 1, 1, Sk); `##..` stands for two keys followed by two keys of padding."""
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
def test_padding_mask_has_lengths_and_starts(
    mask: Tensor, lengths: list[int], starts: list[int]
) -> None:
    found = key_range(mask, 2, 4)
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
def test_mask_that_is_not_padding_has_no_key_range(mask: Tensor) -> None:
    assert key_range(mask, 2, 4) is None
