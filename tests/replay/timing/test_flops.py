"""Counts of operations are checked by hand, and against a materialised mask on random calls."""

import functools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from capture.call.attention_call import AttentionCall
from replay.timing.flops import (
    arithmetic_intensity,
    bytes_moved,
    flops,
    gb_per_s,
    tflops,
    valid_pairs,
)


def make_call(
    q_len: int, kv_len: int, attn_mask: Tensor | None = None, is_causal: bool = False, **sizes: int
) -> AttentionCall:
    """Return a call without values: by default two sequences and four heads of dimension 8."""
    usual = {"batch": 2, "q_heads": 4, "kv_heads": 4, "head_dim": 8, "v_head_dim": 8}
    batch, q_heads, kv_heads, head_dim, v_head_dim = {**usual, **sizes}.values()
    device = "meta" if attn_mask is None else "cpu"
    empty = functools.partial(torch.empty, dtype=torch.bfloat16, device=device)
    return AttentionCall(
        empty(batch, q_heads, q_len, head_dim),
        empty(batch, kv_heads, kv_len, head_dim),
        empty(batch, kv_heads, kv_len, v_head_dim),
        attn_mask=attn_mask,
        is_causal=is_causal,
        enable_gqa=q_heads != kv_heads,
    )


def test_dense_call_counts_all_pairs() -> None:
    call = make_call(3, 5, batch=2, q_heads=4, kv_heads=2, head_dim=8, v_head_dim=16)
    assert valid_pairs(call) == 2 * 4 * 3 * 5
    assert flops(call) == 2 * 120 * (8 + 16)
    query, key, value, output = 2 * 4 * 3 * 8, 2 * 2 * 5 * 8, 2 * 2 * 5 * 16, 2 * 4 * 3 * 16
    assert bytes_moved(call) == 2 * (query + key + value + output)
    assert arithmetic_intensity(call) == flops(call) / bytes_moved(call)


@pytest.mark.parametrize(
    ("q_len", "kv_len", "pairs"), [(4, 4, 10), (3, 5, 6), (5, 3, 1 + 2 + 3 + 3 + 3), (1, 7, 1)]
)
def test_causal_is_aligned_top_left(q_len: int, kv_len: int, pairs: int) -> None:
    call = make_call(q_len, kv_len, batch=2, q_heads=3, kv_heads=3, is_causal=True)
    assert valid_pairs(call) == 2 * 3 * pairs


class Largest(TorchDispatchMode):
    """Notes the number of elements in the largest tensor that is created."""

    elements = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor):
            self.elements = max(self.elements, made.numel())
        return made


def test_wan_causal_is_counted_without_a_score_matrix() -> None:
    call = make_call(75_600, 75_600, batch=1, q_heads=5, kv_heads=5, head_dim=128, is_causal=True)
    with Largest() as largest:
        assert valid_pairs(call) == 5 * 75_600 * 75_601 // 2
    assert largest.elements <= 75_600


def test_rates_equal_figures_by_hand() -> None:
    call = make_call(1000, 1000, batch=1, q_heads=1, kv_heads=1, head_dim=50, v_head_dim=50)
    assert flops(call) == 200_000_000
    assert tflops(call, 2.0) == pytest.approx(0.1)  # 2e8 in 2e-3 s is 1e11 per second
    assert bytes_moved(call) == 400_000
    assert gb_per_s(call, 2.0) == pytest.approx(0.2)  # 4e5 in 2e-3 s is 2e8 per second


def test_expanded_mask_is_neither_materialised_nor_moved_more_than_once() -> None:
    length = 1024
    row = torch.arange(length) < 1000
    mask = row[None, None, None].expand(64, 64, 16 * length, length)
    query = torch.empty(64, 64, 16 * length, 1, device="meta")
    key = torch.empty(64, 64, length, 1, device="meta")
    call = AttentionCall(query, key, key, attn_mask=mask)
    assert valid_pairs(call) == 64 * 64 * 16 * length * 1000
    without = bytes_moved(AttentionCall(query, key, key))
    assert bytes_moved(call) - without == length


def test_each_tensor_counts_at_its_stored_size() -> None:
    shared = torch.zeros(1, 1, 5, 8, dtype=torch.bfloat16)
    key, value = (each.expand(2, 4, 5, 8) for each in (shared, shared.clone()))
    query = torch.zeros(2, 4, 3, 8, dtype=torch.float32)
    call = AttentionCall(query, key, value, attn_mask=torch.zeros(3, 5, dtype=torch.float64))
    output = 2 * 4 * 3 * 8 * 4  # the query's four bytes
    assert bytes_moved(call) == 2 * 4 * 3 * 8 * 4 + 2 * (5 * 8 * 2) + 3 * 5 * 8 + output


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.tuples(*[st.integers(1, 4)] * 2, *[st.integers(1, 7)] * 2),
    broadcast=st.tuples(*[st.booleans()] * 4),
    leading=st.integers(0, 2),
    flags=st.tuples(*[st.booleans()] * 3),
    seed=st.integers(0, 1000),
)
def test_mask_counts_like_its_expansion(
    sizes: tuple[int, ...], broadcast: tuple[bool, ...], leading: int, flags: tuple, seed: int
) -> None:
    (batch, heads, q_len, kv_len), (expand, is_bool, is_causal) = sizes, flags
    torch.manual_seed(seed)
    allowed = torch.rand([1 if once else n for n, once in zip(sizes, broadcast, strict=True)]) > 0.4
    allowed = allowed.flatten(end_dim=leading)[0] if leading == 1 else allowed
    mask = allowed if is_bool else torch.zeros(allowed.shape).masked_fill(~allowed, -torch.inf)
    if expand:
        mask = mask.expand(sizes)
    call = make_call(q_len, kv_len, mask, is_causal, batch=batch, q_heads=heads, kv_heads=heads)
    expanded = allowed.expand(sizes)
    assert valid_pairs(call) == int((expanded.tril() if is_causal else expanded).sum())


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    "attn_mask", [None, torch.zeros(3, 0), torch.zeros(3, 1), torch.zeros(1, 1, 1, 0)]
)
def test_nothing_is_computed_without_keys(attn_mask: Tensor | None, is_causal: bool) -> None:
    call = make_call(3, 0, attn_mask=attn_mask, is_causal=is_causal)
    assert (valid_pairs(call), arithmetic_intensity(call), tflops(call, 1.0)) == (0, 0.0, 0.0)


def test_nothing_is_moved_without_queries_and_keys() -> None:
    call = make_call(0, 0)
    assert (bytes_moved(call), arithmetic_intensity(call)) == (0, 0.0)
