"""Without a GPU, the Hopper backward's own functions give the gradients of the formula."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import attention_kernels as ak
from tests.attention_kernels.gradients import Formula, assert_right, expected
from tests.factories import normal

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")
from attention_kernels.hopper.hopper_backward import empty_gradient, hopper_backward
from attention_kernels.options import AttentionOptions
from tests.attention_kernels.hopper.emulation import emulated

BOTTOM = AttentionOptions(bottom_right=True)
CASES: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "full": ((1, 2, 2, 256, 256, 128), {}),
    "full, ragged": ((1, 2, 1, 70, 130, 64), {}),
    "causal": ((2, 4, 2, 300, 300, 64), {"is_causal": True}),
    "causal 128": ((1, 2, 1, 200, 200, 128), {"is_causal": True}),
    "more queries": ((1, 2, 2, 300, 70, 64), {"is_causal": True, "options": BOTTOM}),
    "more keys": ((1, 1, 1, 70, 300, 64), {"is_causal": True}),
    "bottom right": ((1, 2, 1, 100, 300, 128), {"is_causal": True, "options": BOTTOM}),
    "window": ((1, 2, 1, 400, 400, 128), {"options": AttentionOptions(window=(200, 10))}),
    "narrow window": ((1, 1, 1, 400, 330, 64), {"options": AttentionOptions(window=(30, None))}),
    "low scores": ((1, 1, 1, 130, 200, 64), {}),
}


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(("seed", "name"), enumerate(CASES))
def test_gradients_are_those_of_the_formula(seed: int, name: str) -> None:
    (batch, heads, kv_heads, q_len, k_len, head_dim), options = CASES[name]
    sizes = (heads, q_len), (kv_heads, k_len), (kv_heads, k_len)
    tensors = [
        normal(batch, *size, head_dim, dtype=torch.float16, seed=i) for i, size in enumerate(sizes)
    ]
    if name == "low scores":  # beyond the last key, a weight would be infinite
        tensors[0] += 5.0
        tensors[1] -= 5.0
    if name == "more queries":  # TMA cannot address a tensor that starts at its second number
        tensors = [
            torch.cat([each, each], 3).transpose(1, 2).contiguous().transpose(1, 2)[..., 1:65]
            for each in tensors
        ]
    above = normal(batch, heads, q_len, head_dim, dtype=torch.float16, seed=4)
    below = normal(batch, heads, q_len, seed=5)
    right = expected(Formula(**options), tensors, above, below)
    query, key, value = tensors
    output, lse = ak.prefill(query, key, value, return_lse=True, **options)
    for again in range(2):
        with emulated(seed + again * len(CASES)):
            found = hopper_backward(
                above, query, key, value, output, lse, grad_lse=below, **options
            )
        assert_right(list(found[:3]), *right)
        for ours, given in zip(found[:3], tensors, strict=True):
            assert ours.stride() == empty_gradient(given).stride()
