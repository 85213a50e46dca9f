"""On a Hopper GPU, gradients of the Hopper kernel are those of the formula in float64."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import attention_kernels as ak
from tests.attention_kernels.calls import lengths, normal, offsets
from tests.attention_kernels.gradients import Formula, assert_right, expected, gradients

hopper = pytest.importorskip("attention_kernels.hopper.hopper_backward")
pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0),
    reason="needs a Hopper GPU",
)
BOTTOM = ak.AttentionOptions(bottom_right=True)
WINDOW = ak.AttentionOptions(True, (90, 10))
CASES: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "head_dim 32": ((2, 4, 2, 500, 700, 32, 32), {}),
    "head_dim 40": ((1, 4, 4, 700, 500, 40, 40), {"is_causal": True}),
    "head_dim 72": ((1, 4, 4, 500, 500, 72, 72), {"is_causal": True}),
    "head_dim 96": ((2, 4, 1, 500, 700, 96, 96), {"is_causal": True, "options": BOTTOM}),
    "head_dim 112": ((1, 4, 4, 129, 300, 112, 112), {"options": WINDOW}),
    "wide value": ((1, 4, 2, 300, 300, 64, 128), {"is_causal": True}),
    "narrow value": ((1, 4, 2, 300, 300, 96, 40), {}),
    "soft cap 64": ((1, 8, 2, 700, 700, 64, 64), {"options": ak.AttentionOptions(softcap=2.0)}),
    "soft cap 128": (
        (1, 8, 2, 700, 700, 128, 128),
        {"is_causal": True, "options": ak.AttentionOptions(softcap=20.0)},
    ),
    "sinks 64": ((2, 4, 2, 300, 200, 64, 64), {"is_causal": True, "options": BOTTOM}),
    "sinks 128": ((2, 4, 2, 300, 500, 128, 128), {"options": WINDOW}),
}


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Count the calls of the Hopper kernel, and fill new memory with NaN."""
    found: list[str] = []
    backward = hopper.hopper_backward

    def counted(*given: Any, **options: Any) -> Any:
        found.append("hopper")
        torch.full((2**24,), math.nan, device="cuda")
        return backward(*given, **options)

    monkeypatch.setattr(hopper, "hopper_backward", counted)
    return found


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_the_formula(name: str, calls: list[str]) -> None:
    (batch, heads, kv_heads, q_len, k_len, head_dim, v_head_dim), options = CASES[name]
    sizes = (heads, q_len, head_dim), (kv_heads, k_len, head_dim), (kv_heads, k_len, v_head_dim)
    dtype = torch.bfloat16
    tensors = [normal(batch, *size, dtype=dtype, seed=i) for i, size in enumerate(sizes)]
    if "sinks" in name:
        tensors.append(2 * normal(heads, seed=3))
    above = normal(batch, heads, q_len, v_head_dim, dtype=dtype, seed=4)
    below = normal(batch, heads, q_len, seed=5)

    def ours(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None) -> Any:
        return ak.attention(
            query, key, value, enable_gqa=True, sinks=sinks, return_lse=True, **options
        )

    found = gradients(ours, tensors, above, below)
    assert calls == ["hopper"]
    rounded, exact = expected(Formula(**options), tensors, above, below)
    assert_right(found[:3], rounded[:3], exact[:3])
    for of_sinks, best in zip(found[3:], exact[3:], strict=True):
        assert_sinks(of_sinks, best)


def assert_sinks(found: Tensor, exact: Tensor) -> None:
    """Check a gradient of sinks, which are too few for statistics of their errors. Each is a sum
    over all rows, some 10 in size, with the rounding errors of their outputs in bfloat16."""
    torch.testing.assert_close(found.double(), exact, rtol=1e-2, atol=5e-2)


PACKS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "full 64": (64, 64, {}),
    "full 128": (128, 128, {}),
    "causal 64": (64, 64, {"causal": True}),
    "causal 128": (128, 128, {"causal": True}),
    "causal 96": (96, 96, {"causal": True}),
    "wide value": (40, 96, {"causal": True}),
    "window 64": (64, 64, {"window_size": (90, 10)}),
    "window 128": (128, 128, {"window_size": (90, 10), "softcap": 5.0}),
    "soft cap 64": (64, 64, {"causal": True, "softcap": 5.0}),
}
PACKED_SIZES = {
    "uneven": (
        (0, 300, 1, 64, 0, 129, 700),
        (40, 300, 9, 0, 0, 500, 650),
        (40, 300, 9, 0, 0, 410, 650),
    ),
    "many": (
        (5, 33, 64, 1, 127, 128) * 8,
        (5, 33, 80, 1, 127, 200) * 8,
        (5, 33, 70, 1, 127, 200) * 8,
    ),
}
"""Numbers of queries, of keys, and of valid keys of each sequence."""


@pytest.mark.parametrize("sizes", PACKED_SIZES)
@pytest.mark.parametrize("name", PACKS)
def test_gradients_of_packed_sequences_ignore_other_tokens(
    name: str, sizes: str, calls: list[str]
) -> None:
    head_dim, v_head_dim, options = PACKS[name]
    counts, keys, used = PACKED_SIZES[sizes]
    starts, k_starts = offsets(*counts), offsets(*keys)
    tokens, k_tokens = int(starts[-1]) + 50, int(k_starts[-1]) + 200
    shapes = (tokens, 4, head_dim), (k_tokens, 2, head_dim), (k_tokens, 2, v_head_dim)
    *tensors, above = (
        normal(*shape, dtype=torch.bfloat16, seed=i)
        for i, shape in enumerate((*shapes, (tokens, 4, v_head_dim)))
    )
    parts = [
        (slice(q, q + n), slice(k, k + m))
        for q, n, k, m in zip(starts.tolist(), counts, k_starts.tolist(), used, strict=False)
    ]
    for tensor, place in zip((*tensors, above), (0, 1, 1, 0), strict=True):
        outside = torch.ones(len(tensor), dtype=torch.bool, device="cuda")
        for part in parts:
            outside[part[place]] = False
        tensor[outside] = math.nan
    below = normal(4, tokens, seed=8)
    leaves = [each.requires_grad_() for each in (*tensors, normal(4, seed=9))]
    query, key, value, sinks = leaves
    output, lse, _ = ak.flash_attn_varlen_func(
        query, key, value, starts, k_starts, max(counts), max(keys), seqused_k=lengths(*used),
        s_aux=sinks, return_attn_probs=True, **options,
    )  # fmt: skip
    once, again = (
        torch.autograd.grad((output, lse), leaves, (above, below), retain_graph=True)
        for _ in range(2)
    )
    assert calls == ["hopper"] * 2
    for one, other in zip(once[1:], again[1:], strict=True):
        assert torch.equal(one, other)
    *found, of_sinks = once
    window = options.get("window_size", (None, None))
    formula = Formula(
        is_causal="causal" in options,
        options=ak.AttentionOptions(True, window, options.get("softcap")),
    )
    total = torch.zeros(4, dtype=torch.float64, device="cuda")
    judged: list[tuple[list[Tensor], list[Tensor], list[Tensor]]] = []
    for of_queries, of_keys in parts:
        places = of_queries, of_keys, of_keys
        each = [t.detach()[p].transpose(0, 1)[None] for t, p in zip(tensors, places, strict=True)]
        its_above = above[of_queries].transpose(0, 1)[None]
        rounded, exact = expected(
            formula, [*each, sinks.detach()], its_above, below[None, :, of_queries]
        )
        if each[0].numel() and each[1].numel():
            ours = [t[p].transpose(0, 1)[None] for t, p in zip(found, places, strict=True)]
            judged.append(([each.clone() for each in ours], rounded[:3], exact[:3]))
            for tensor, tokens_of in zip(found, places, strict=True):
                tensor[tokens_of] = 0.0
        total += exact[3]
    # A sequence alone may have so few numbers that twice the rounding error is a matter of luck.
    of_all = (
        [torch.cat(pieces, 2) for pieces in zip(*each, strict=True)]
        for each in zip(*judged, strict=True)
    )
    assert_right(*of_all)
    assert not any(tensor.any() for tensor in found)
    assert_sinks(of_sinks, total)
