"""Every installed kernel is right on calls beyond SDPA whose lengths are not multiples of a
block."""

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch

from capture.call.attention_call import AttentionCall
from capture.call.attention_variant import AttentionVariant
from replay.accuracy.verdict import Expected, judge
from replay.kernels.registry import catalogue, find
from tests.factories import normal, random_call
from tests.variant_calls import paged_call

HALF, BRAIN = torch.float16, torch.bfloat16
BOTTOM_RIGHT = AttentionVariant(bottom_right=True)


def _offsets(*lengths: int) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def _lengths(*lengths: int) -> torch.Tensor:
    return torch.tensor(lengths).int()


def _call(
    batch: int, q_heads: int, kv_heads: int, q_len: int, kv_len: int, head_dim: int, **fields: Any
) -> dict[str, Any]:
    sizes = {"batch": batch, "q_heads": q_heads, "kv_heads": kv_heads}
    return {**sizes, "q_len": q_len, "kv_len": kv_len, "head_dim": head_dim, **fields}


def _window(left: int, right: int | None = None, softcap: float | None = None) -> dict[str, Any]:
    """Return fields for a window aligned bottom right; without a right side, the call is causal."""
    variant = AttentionVariant(True, (left, right), softcap)
    return {"variant": variant, "is_causal": right is None}


SINKS = normal(64, seed=7, dtype=BRAIN)
PACKED = {"cu_seqlens_q": _offsets(700, 1, 1300, 99), "cu_seqlens_k": _offsets(700, 1, 1300, 99)}
LONGER = {"cu_seqlens_q": _offsets(70, 1, 130, 99), "cu_seqlens_k": _offsets(700, 1, 1300, 99)}

CAUSAL: dict[str, Any] = {"is_causal": True, "variant": BOTTOM_RIGHT}

CALLS: dict[str, dict[str, Any]] = {
    "bottom right": _call(1, 8, 2, 300, 1500, 128, **CAUSAL),
    "bottom right, fewer keys": _call(2, 4, 4, 1500, 300, 64, dtype=HALF, **CAUSAL),
    "window": _call(2, 8, 2, 2100, 2100, 128, **_window(1023)),
    "window, longer keys": _call(1, 8, 8, 500, 2100, 64, dtype=HALF, **_window(255)),
    "window, top left": _call(
        1, 4, 4, 500, 2100, 64, dtype=HALF, variant=AttentionVariant(window=(300, 200))
    ),
    "window both ways": _call(1, 8, 8, 2100, 2100, 64, dtype=HALF, **_window(200, 100)),
    "window both ways, head_dim 128": _call(1, 8, 8, 2100, 2100, 128, **_window(512, 512)),
    "soft cap": _call(
        *(1, 8, 4, 1100, 1100, 128),
        is_causal=True,
        scale=1.0,
        variant=AttentionVariant(softcap=50.0),
    ),
    "soft cap and window, head_dim 256": _call(
        1, 8, 4, 2100, 2100, 256, **_window(1023, softcap=5.0)
    ),
    "sinks": _call(1, 64, 8, 1100, 1100, 64, is_causal=True, sinks=SINKS),
    "sinks and window": _call(1, 64, 8, 1100, 1100, 64, sinks=SINKS, **_window(127)),
    "sinks in float32": _call(1, 8, 8, 700, 700, 128, dtype=HALF, sinks=SINKS[:8].float()),
    "packed": _call(1, 16, 16, 2100, 2100, 80, **PACKED),
    "packed, causal": _call(
        *(1, 8, 2, 2100, 2100, 128),
        **PACKED,
        is_causal=True,
        variant=AttentionVariant(bottom_right=True, max_seqlen_q=1300, max_seqlen_k=1300),
    ),
    "packed, longer keys": _call(1, 8, 2, 300, 2100, 64, **LONGER, dtype=HALF, **CAUSAL),
    "packed, window": _call(1, 8, 8, 2100, 2100, 128, **PACKED, **_window(255)),
    "packed, window, sinks": _call(1, 64, 8, 2100, 2100, 64, **PACKED, sinks=SINKS, **_window(127)),
    "packed, key lengths": _call(
        1, 8, 2, 300, 2100, 128, **LONGER, seqused_k=_lengths(650, 1, 777, 99), **CAUSAL
    ),
    "decode": _call(4, 32, 8, 1, 4250, 128, **CAUSAL),
    "decode, window": _call(4, 32, 8, 1, 4250, 128, **_window(1023)),
    "decode, window, sinks": _call(4, 64, 8, 1, 4250, 64, sinks=SINKS, **_window(127)),
    "decode, sinks": _call(4, 64, 8, 1, 4250, 64, sinks=SINKS),
    "decode, soft cap": _call(
        4, 8, 4, 1, 4250, 256, dtype=HALF, variant=AttentionVariant(softcap=5.0)
    ),
    "decode, key lengths": _call(
        4, 32, 8, 1, 4250, 128, seqused_k=_lengths(4250, 1, 345, 2000), **CAUSAL
    ),
    "some queries, key lengths": _call(
        *(4, 32, 8, 4, 4250, 64),
        dtype=HALF,
        seqused_k=_lengths(4250, 4, 345, 2000),
        **_window(511),
    ),
}

PAGED: dict[str, dict[str, Any]] = {
    "pages of 16, decode": {"page_size": 16, "q_len": 1, "head_dim": 128},
    "pages of 256, some queries, window": {
        "page_size": 256,
        "q_len": 4,
        "head_dim": 64,
        "is_causal": True,
        "variant": AttentionVariant(True, (511, None)),
    },
    "pages of 256, packed": {
        "page_size": 256,
        "q_len": 1202,
        "head_dim": 128,
        "is_causal": True,
        "cu_seqlens_q": _offsets(1, 700, 1, 500),
        "variant": BOTTOM_RIGHT,
    },
    "absorbed MLA": {"page_size": 64, "q_len": 1, "head_dim": 576, "q_heads": 128, "kv_heads": 1},
}

KERNELS = [
    # FlashInfer compiles a module for each kind of call, which takes a minute.
    pytest.param(name, marks=[pytest.mark.slow] if name.startswith("flashinfer") else [])
    for name, kernel in catalogue().items()
    if kernel.features
]


@functools.cache
def _expected(name: str) -> tuple[AttentionCall, Expected]:
    if name in PAGED:
        call = _paged(**PAGED[name]).to("cuda")
    else:
        call = random_call(**{"dtype": BRAIN, **CALLS[name]}).to("cuda")
    return call, Expected.of(call)


def _paged(page_size: int, **sizes: Any) -> AttentionCall:
    sizes = {"q_heads": 32, "kv_heads": 8, "dtype": BRAIN, **sizes}
    call = paged_call([4250, 1, 777, 2000], page_size, **sizes)
    return replace(call, value=call.key[..., :512]) if sizes["head_dim"] == 576 else call


@pytest.mark.parametrize("name", [*CALLS, *PAGED])
@pytest.mark.parametrize("kernel_name", KERNELS)
def test_kernel_is_right(kernel_name: str, name: str) -> None:
    kernel = find(kernel_name)
    if reason := kernel.unavailable(torch.device("cuda")):
        pytest.skip(reason)
    call, expected = _expected(name)
    if reason := kernel.refuses(call):
        pytest.skip(reason)
    with torch.no_grad():
        outputs = {"drop-in": kernel.attention(**call.arguments())}
        if kernel.prepare is not None:
            outputs["core"] = kernel.prepare(call)()
    for which, output in outputs.items():
        verdict = judge(output, expected, kernel.accuracy_class)
        assert verdict.passed, f"{which}: {verdict.sentence}"


@pytest.mark.parametrize("name", CALLS)
def test_one_of_our_kernels_takes_the_call(name: str) -> None:
    call, _ = _expected(name)
    ours = [kernel for kernel in catalogue().values() if kernel.library == "triton"]
    assert any(kernel.refuses(call) is None for kernel in ours)


def test_keys_outside_a_window_cost_only_their_memory() -> None:
    """Keys outside the window are not read, so a NaN in one affects only queries that see it."""
    call, _ = _expected("window")
    expected = find("triton-fa2").attention(**call.arguments())
    key, value = call.key.clone(), call.value.clone()
    key[:, :, :500], value[:, :, :500] = torch.nan, torch.nan
    output = find("triton-fa2").attention(**{**call.arguments(), "key": key, "value": value})
    beyond = 500 + 1023 + 256
    assert torch.equal(output[:, :, beyond:], expected[:, :, beyond:])
