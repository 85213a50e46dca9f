"""Gradients of `attention` and of FlashAttention's functions are those of the textbook formula in
float64, and are complete and finite whatever the memory held before."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import attention_kernels as ak
from attention_kernels import AttentionOptions, dispatch
from attention_kernels.portable.backward import backward
from tests.attention_kernels.calls import DEVICE, band, lengths, normal, offsets
from tests.attention_kernels.gradients import Formula, assert_right, expected, gradients

pytestmark = pytest.mark.usefixtures("poisoned")


BOTTOM = AttentionOptions(bottom_right=True)
BIAS = torch.where(band(70, 90, 40), 0.0, -1.0)
CASES: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "one query": ((2, 4, 2, 1, 65, 16, 16), {}),
    "wide value": ((1, 4, 1, 63, 129, 24, 40), {}),
    "causal": ((1, 4, 2, 129, 129, 32, 32), {"is_causal": True}),
    "causal, more queries": ((1, 2, 2, 130, 65, 16, 16), {"is_causal": True}),
    "bottom right, rows that see nothing": (
        (2, 2, 1, 150, 64, 16, 16),
        {"is_causal": True, "options": BOTTOM},
    ),
    "window": ((1, 2, 1, 200, 300, 16, 16), {"options": AttentionOptions(True, (20, 30))}),
    "window of one key": (
        (1, 2, 2, 127, 128, 16, 16),
        {"options": AttentionOptions(window=(0, 0))},
    ),
    "window, right side": (
        (1, 2, 2, 70, 90, 16, 16),
        {"options": AttentionOptions(window=(None, 5))},
    ),
    "soft cap": (
        (1, 2, 1, 70, 90, 16, 16),
        {"is_causal": True, "options": AttentionOptions(softcap=0.7)},
    ),
    "soft cap, masked": (
        (1, 2, 1, 70, 90, 16, 16),
        {"attn_mask": band(70, 90, 9), "options": AttentionOptions(softcap=0.7)},
    ),
    "sinks": ((2, 4, 2, 70, 90, 16, 16), {"sinks": True, "is_causal": True, "options": BOTTOM}),
    "sinks, rows that see nothing": (
        (1, 2, 1, 90, 40, 16, 16),
        {"sinks": True, "attn_mask": band(90, 40, 10)},
    ),
    "mask by head": ((2, 2, 1, 70, 90, 16, 16), {"attn_mask": torch.stack([BIAS, -BIAS])}),
    "mask of keys": ((2, 2, 1, 70, 90, 16, 16), {"attn_mask": (band(2, 90, 50))[:, None, None]}),
    "bias of keys": ((2, 2, 1, 70, 90, 16, 16), {"attn_mask": BIAS[:2, None, None] * 4}),
    "mask and window": (
        (1, 2, 1, 70, 90, 16, 16),
        {"attn_mask": BIAS, "options": AttentionOptions(window=(30, 9))},
    ),
    "scanned mask": ((1, 2, 1, 300, 200, 16, 16), {"attn_mask": band(300, 200, 20)}),
    "scanned bias by head": (
        (2, 2, 1, 130, 200, 16, 16),
        {"attn_mask": torch.stack([band(130, 200, 9), band(130, 200, 99)]).float().log()},
    ),
    "nothing seen": ((1, 2, 1, 20, 70, 16, 16), {"attn_mask": band(20, 70, 0)}),
    "negative scale": ((1, 2, 1, 20, 70, 16, 16), {"scale": -0.3}),
    "scale of zero": ((1, 2, 1, 20, 70, 16, 16), {"scale": 0.0}),
    "head_dim 256": ((1, 2, 1, 40, 70, 256, 200), {"is_causal": True}),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_the_formula(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    (batch, heads, kv_heads, q_len, k_len, head_dim, v_head_dim), given = CASES[name]
    sizes = (heads, q_len, head_dim), (kv_heads, k_len, head_dim), (kv_heads, k_len, v_head_dim)
    tensors = [normal(batch, *size, dtype=dtype, seed=i) for i, size in enumerate(sizes)]
    if given.get("sinks"):
        tensors.append(normal(heads, dtype=torch.float32, seed=3))
    options = {key: value for key, value in given.items() if key != "sinks"}
    grad_output = normal(batch, heads, 1, v_head_dim, dtype=dtype, seed=4).expand(-1, -1, q_len, -1)
    grad_lse = normal(batch, heads, q_len, seed=5)
    monkeypatch.setattr(dispatch, "WORTH_LOOKING", 0 if "scanned" in name else 2**20)

    def ours(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None) -> Any:
        tensors = (
            each.transpose(1, 2).contiguous().transpose(1, 2) for each in (query, key, value)
        )
        return ak.attention(*tensors, enable_gqa=True, sinks=sinks, return_lse=True, **options)

    found = gradients(ours, tensors, grad_output, grad_lse)
    assert_right(found, *expected(Formula(**options), tensors, grad_output, grad_lse))


def packed(dtype: torch.dtype) -> tuple[list[Tensor], dict[str, Any], list[tuple[slice, slice]]]:
    """Return packed query, key, value and gradient of the output, arguments of the function, and
    the tokens of each sequence. Tokens that belong to no sequence are NaN."""
    counts, keys, used = (65, 0, 20, 7), (90, 5, 0, 40), (90, 5, 0, 33)
    starts, k_starts = offsets(*counts), offsets(*keys)
    tokens, k_tokens = int(starts[-1]), int(k_starts[-1])
    shapes = (tokens, 4, 16), (k_tokens, 2, 16), (k_tokens, 2, 24), (tokens, 4, 24)
    tensors = [normal(*shape, dtype=dtype, seed=i) for i, shape in enumerate(shapes)]
    parts = [
        (slice(int(q), int(q) + n), slice(int(k), int(k) + m))
        for q, n, k, m in zip(starts, counts, k_starts, used, strict=False)
    ]
    for tensor, place in zip(tensors, (0, 1, 1, 0), strict=True):
        outside = torch.ones(len(tensor), dtype=torch.bool, device=DEVICE)
        for part in parts:
            outside[part[place]] = False
        tensor[outside] = math.nan
    options = {
        "cu_seqlens_q": starts,
        "cu_seqlens_k": k_starts,
        "max_seqlen_q": 70,
        "max_seqlen_k": 90,
        "seqused_k": lengths(*used),
        "causal": True,
        "return_attn_probs": True,
    }
    return tensors, options, parts


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_gradients_of_packed_sequences_ignore_other_tokens(dtype: torch.dtype) -> None:
    (*tensors, grad_output), options, parts = packed(dtype)
    leaves = [each.requires_grad_() for each in (*tensors, normal(4, seed=9))]
    query, key, value, sinks = leaves
    output, lse, _ = ak.flash_attn_varlen_func(query, key, value, s_aux=sinks, **options)
    rows = torch.cat([torch.arange(part.start, part.stop) for part, _ in parts])
    loss = (output * grad_output)[rows].sum() + lse[:, rows].sin().sum()
    *found, of_sinks = torch.autograd.grad(loss, leaves)
    formula = Formula(is_causal=True, options=BOTTOM)
    total = torch.zeros(4, dtype=torch.float64, device=DEVICE)
    for of_queries, of_keys in parts:
        places = of_queries, of_keys, of_keys
        each = [t.detach()[p].transpose(0, 1)[None] for t, p in zip(tensors, places, strict=True)]
        above = grad_output[of_queries].transpose(0, 1)[None]
        below = lse.detach()[None, :, of_queries].double().cos()
        rounded, exact = expected(formula, [*each, sinks.detach().to(dtype)], above, below)
        if each[0].numel() and each[1].numel():
            ours = [t[p].transpose(0, 1)[None] for t, p in zip(found, places, strict=True)]
            assert_right(ours, rounded[:3], exact[:3])
        total += exact[3]
        for tensor, place in zip(found, places, strict=True):
            tensor[place] = 0.0
    assert not any(tensor.any() for tensor in found)
    torch.testing.assert_close(of_sinks.double(), total, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("value", [math.inf, -math.inf])
def test_infinite_log_sum_exp_gives_zeros(value: float) -> None:
    query, key, tensor = (normal(1, 2, 40, 16, seed=i) for i in range(3))
    output, lse = ak.prefill(query, key, tensor, return_lse=True)
    lse[:, :, 7:] = value
    found = backward(query, query, key, tensor, None, output, lse)
    few, of_few, few_lse = (each[:, :, :7] for each in (query, output, lse))
    expected = backward(few, few, key, tensor, None, of_few, few_lse)
    torch.testing.assert_close(found.query[:, :, :7], expected.query)
    assert not found.query[:, :, 7:].any()
    for ours, theirs in zip(found[1:3], expected[1:3], strict=True):
        torch.testing.assert_close(ours, theirs)


def test_gradients_of_broadcast_tensors_are_those_of_copies() -> None:
    query, narrow = normal(2, 4, 40, 16), normal(1, 1, 70, 16, seed=1)
    found = []
    for is_copy in (False, True):
        leaves = [each.detach().requires_grad_() for each in (query, narrow)]
        wide = leaves[1].expand(2, 4, -1, -1)
        key = wide.clone() if is_copy else wide
        found.append(torch.autograd.grad(ak.attention(leaves[0], key, key).sin().sum(), leaves))
    for ours, right in zip(*found, strict=True):
        torch.testing.assert_close(ours, right)


@pytest.mark.parametrize("sizes", [(0, 5), (5, 0)])
def test_gradients_of_nothing_are_zeros(sizes: tuple[int, int]) -> None:
    shapes = [(1, 2, length, 16) for length in (sizes[0], sizes[1], sizes[1])]
    leaves = [normal(*shape).requires_grad_() for shape in shapes]
    found = torch.autograd.grad(ak.attention(*leaves).sum(), leaves)
    assert [tuple(each.shape) for each in found] == shapes
    assert not any(each.any() for each in found)


NEEDS = normal(1, 2, 20, 16, dtype=torch.float16).requires_grad_()
WIDE = normal(1, 1, 1, 320, dtype=torch.float16).requires_grad_()
REFUSED: dict[str, dict[str, Any]] = {
    "precision='fp8' has no backward pass": {"precision": "fp8"},
    "precision='int8' has no backward pass": {"precision": "int8"},
    "attn_mask that requires a gradient has no backward pass": {
        "attn_mask": normal(20, 20).requires_grad_()
    },
    "head dimensions 320 and 288 has no backward pass": {
        **{"query": WIDE, "key": WIDE, "value": WIDE[..., :288]}
    },
}


@pytest.mark.parametrize("message", REFUSED)
def test_calls_without_a_backward_pass_are_refused(message: str) -> None:
    given = {"query": NEEDS, "key": NEEDS, "value": NEEDS, **REFUSED[message]}
    with pytest.raises(NotImplementedError, match=message):
        ak.attention(**given)
