"""Without a GPU, the Hopper backward's own functions give the gradients of the formula."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import attention_kernels as ak
from tests.attention_kernels.calls import lengths as numbers
from tests.attention_kernels.calls import offsets
from tests.attention_kernels.gradients import Formula, assert_right, expected
from tests.factories import normal

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")
from attention_kernels.hopper.hopper_backward import empty_gradient, hopper_backward
from attention_kernels.options import AttentionOptions, Lengths
from attention_kernels.portable.forward import forward
from tests.attention_kernels.hopper.emulation import emulated

BOTTOM = AttentionOptions(bottom_right=True)
CASES: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "wide": ((1, 2, 2, 128, 192, 256), {}),
    "wide, ragged": ((1, 2, 1, 70, 130, 256), {}),
    "wide causal": ((2, 4, 2, 140, 140, 256), {"is_causal": True}),
    "wide bottom right": ((1, 2, 1, 70, 200, 256), {"is_causal": True, "options": BOTTOM}),
    "wide more keys": ((1, 1, 1, 70, 300, 256), {"is_causal": True}),
    "wide window": ((1, 2, 1, 200, 200, 256), {"options": AttentionOptions(window=(90, 10))}),
    "192, 128": ((1, 2, 1, 130, 70, 192, 128), {}),
    "192, 128 causal": ((1, 2, 1, 140, 140, 192, 128), {"is_causal": True}),
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
    "soft cap": ((1, 1, 1, 130, 140, 64), {"options": AttentionOptions(softcap=0.7)}),
    "soft cap 128": (
        (1, 2, 1, 130, 140, 128),
        {"is_causal": True, "options": AttentionOptions(softcap=3.0)},
    ),
    "sinks": ((2, 4, 2, 70, 90, 64), {"sinks": True, "is_causal": True, "options": BOTTOM}),
    "head_dim 96": ((2, 2, 1, 130, 140, 96), {"is_causal": True}),
    "head_dim 48": ((1, 2, 1, 130, 70, 48), {}),
    "wide value": ((1, 2, 1, 70, 130, 40, 128), {"sinks": True}),
}


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(("seed", "name"), enumerate(CASES))
def test_gradients_are_those_of_the_formula(seed: int, name: str) -> None:
    (batch, heads, kv_heads, q_len, k_len, head_dim, *others), given = CASES[name]
    v_head_dim = others[0] if others else head_dim
    sizes = (heads, q_len, head_dim), (kv_heads, k_len, head_dim), (kv_heads, k_len, v_head_dim)
    tensors = [normal(batch, *size, dtype=torch.float16, seed=i) for i, size in enumerate(sizes)]
    options = {key: value for key, value in given.items() if key != "sinks"}
    sinks = normal(heads, seed=6) if "sinks" in given else None
    if name == "low scores":  # beyond the last key, a weight would be infinite
        tensors[0] += 5.0
        tensors[1] -= 5.0
    if name == "more queries":  # TMA cannot address a tensor that starts at its second number
        tensors = [
            torch.cat([each, each], 3).transpose(1, 2).contiguous().transpose(1, 2)[..., 1:65]
            for each in tensors
        ]
    above = normal(batch, heads, q_len, v_head_dim, dtype=torch.float16, seed=4)
    below = normal(batch, heads, q_len, seed=5)
    leaves = [*tensors, *([] if sinks is None else [sinks])]
    right = expected(Formula(**options), leaves, above, below)
    query, key, value = tensors
    output, lse = ak.prefill(query, key, value, return_lse=True, sinks=sinks, **options)
    for again in range(2):
        with emulated(seed + again * len(CASES)):
            found = hopper_backward(
                above, query, key, value, output, lse, grad_lse=below, sinks=sinks, **options
            )
        assert_right([each for each in found if each is not None], *right)
        for ours, tensor in zip(found[:3], tensors, strict=True):
            assert ours.stride() == empty_gradient(tensor).stride()


PACKS: dict[str, tuple[int, dict[str, Any]]] = {
    "full 64": (64, {}),
    "causal 64": (64, {"is_causal": True, "options": BOTTOM}),
    "causal 128": (128, {"is_causal": True, "options": BOTTOM}),
    "window 96": (96, {"options": AttentionOptions(True, (40, 3), softcap=2.0)}),
}


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(("seed", "name"), enumerate(PACKS))
def test_gradients_of_packed_sequences_ignore_other_tokens(seed: int, name: str) -> None:
    head_dim, options = PACKS[name]
    counts, keys, used = (0, 150, 64, 0, 1, 20), (9, 150, 0, 30, 131, 8), (9, 140, 0, 30, 131, 8)
    starts, k_starts = offsets(*counts), offsets(*keys)
    tokens, k_tokens = int(starts[-1]) + 7, int(k_starts[-1]) + 5
    shapes = (tokens, 2, head_dim), (k_tokens, 1, head_dim), (k_tokens, 1, head_dim)
    query, key, value, above = (
        normal(*shape, dtype=torch.float16, seed=i).transpose(0, 1)[None]
        for i, shape in enumerate((*shapes, shapes[0]))
    )
    sinks, below = normal(2, seed=8), normal(1, 2, tokens, seed=9)
    parts = [
        (slice(int(q), int(q) + n), slice(int(k), int(k) + m))
        for q, n, k, m in zip(starts, counts, k_starts, used, strict=False)
    ]
    for tensor, place in ((query, 0), (key, 1), (value, 1), (above, 0)):
        is_own = torch.zeros(tensor.shape[2], dtype=torch.bool)
        for part in parts:
            is_own[part[place]] = True
        tensor[:, :, ~is_own] = torch.nan
    lengths = Lengths("packed", len(counts), 150, starts, k_starts, numbers(*used))
    options = {"is_causal": False, **options}
    output, lse = forward(
        *(query, key, value, None),
        **{"scale": None, "lengths": lengths, "has_lse": True, "sinks": sinks, **options},
    )
    assert lse is not None
    tensors = query, key, value, output, lse
    with emulated(seed):
        found = hopper_backward(
            above, *tensors, lengths=lengths, sinks=sinks, grad_lse=below, **options
        )
    assert found.sinks is not None
    of_sinks = torch.zeros(2, dtype=torch.float64)
    for queries, of_keys in parts:
        places = queries, of_keys, of_keys
        each = [
            tensor[:, :, place] for tensor, place in zip((query, key, value), places, strict=True)
        ]
        rounded, exact = expected(
            Formula(**options), [*each, sinks], above[:, :, queries], below[:, :, queries]
        )
        of_sinks += exact[3]
        ours = [tensor[:, :, place] for tensor, place in zip(found[:3], places, strict=True)]
        if each[0].numel() and each[1].numel():
            assert_right(ours, rounded[:3], exact[:3])
            for tensor in ours:
                tensor.zero_()
    assert not any(tensor.any() for tensor in found[:3])
    torch.testing.assert_close(found.sinks.double(), of_sinks, rtol=1e-3, atol=1e-3)
