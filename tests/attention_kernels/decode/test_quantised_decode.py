"""Decode over an 8-bit cache attends to the stored numbers, which approximate the originals."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from attention_kernels.decode import quantised_cache, split_kv
from attention_kernels.decode.quantised_cache import CACHE_BLOCK, QuantisedCache, quantise_cache
from attention_kernels.decode.quantised_decode import quantised_decode, random_pages
from attention_kernels.decode.split_kv_assignment import KeyAssignment
from attention_kernels.decode.split_kv_plan import Tiling
from attention_kernels.options import PLAIN, AttentionOptions
from capture.call.attention_call import AttentionCall
from capture.call.attention_variant import AttentionVariant
from replay.accuracy.reference import attention
from replay.kernels.registry import find
from tests.attention_kernels import calls
from tests.attention_kernels.calls import DEVICE, assert_near, lengths, normal
from tests.replay.kernels.pairwise import each_pair

FP8 = torch.float8_e4m3fn
NAMES = {torch.int8: "triton-decode-int8", FP8: "triton-decode-fp8"}
ROUNDING = {torch.int8: 0.5 / 127, FP8: 16 / 448}
"""Largest rounding error as a fraction of a token's largest number."""
each_dtype = pytest.mark.parametrize("dtype", NAMES, ids=NAMES.values())


def call_of(q_len: int = 1, kv_len: int = 270, **fields: Any) -> AttentionCall:
    return calls.call_of(q_len, kv_len, **fields)


def dequantised(cache: QuantisedCache, head_dim: int) -> tuple[Tensor, Tensor]:
    """Return the keys (B, Hkv, Sk, D) and values (B, Hkv, Sk, Dv) of a cache in float64."""
    block, v_dim = CACHE_BLOCK.value, cache.sizes[2]
    key = cache.key.double()[..., :head_dim] * cache.key_scale.double()[..., None]
    # The two groups of eight tokens alternate within every 16.
    value = cache.value.double().unflatten(3, (-1, 8, 2)).mT.flatten(3)
    value = value.unflatten(2, (-1, v_dim)).mT.flatten(2, 3)
    value = value * cache.value_scale.double()[..., None]
    assert key.shape[2] == value.shape[2] == -(-cache.kv_len // block) * block
    key = key + cache.key_mean.double()[:, :, None]
    return key[:, :, : cache.kv_len], value[:, :, : cache.kv_len]


def assert_attends_to_stored(call: AttentionCall, dtype: torch.dtype, *, is_prepared: bool) -> None:
    """Check the core, which gets an 8-bit cache, or the drop-in, which makes the cache itself."""
    kernel = find(NAMES[dtype])
    assert kernel.refuses(call) is None
    key, value = dequantised(
        quantise_cache(call.key, call.value, dtype, lengths=call.seqused_k), call.shape.head_dim
    )
    stored = call.with_tensors({"query": call.query.double(), "key": key, "value": value})
    expected = attention(stored)
    output = kernel.prepare(call)() if is_prepared else kernel.attention(**call.arguments())
    assert output.dtype == call.dtype
    assert_near(output, expected)


@each_pair(
    kv_len=[1, 129, 390],
    dims=[(64, 64), (40, 72), (128, 96), (16, 256)],
    rows=[(2, 1), (2, 5), (40, 1)],
    float_dtype=[torch.float16, torch.bfloat16],
    dtype=NAMES,
    is_prepared=[False, True],
)
def test_shapes(
    kv_len: int,
    dims: tuple[int, int],
    rows: tuple[int, int],
    float_dtype: torch.dtype,
    dtype: torch.dtype,
    is_prepared: bool,
) -> None:
    call = call_of(
        kv_len=kv_len,
        head_dim=dims[0],
        v_head_dim=dims[1],
        q_heads=rows[0],
        kv_heads=2,
        q_len=rows[1],
        batch=2,
        dtype=float_dtype,
        scale=0.1,
    )
    assert_attends_to_stored(call, dtype, is_prepared=is_prepared)


def test_a_cache_that_grows_within_its_last_block() -> None:
    """A plan that is stored for a shape also depends on the number of tokens."""
    for kv_len in (140, 150):
        for is_prepared in (False, True):
            assert_attends_to_stored(call_of(kv_len=kv_len), torch.int8, is_prepared=is_prepared)


@each_dtype
def test_every_number_is_near_the_original(dtype: torch.dtype) -> None:
    call = call_of(batch=2, kv_len=200, head_dim=40, v_head_dim=72)
    call.key[..., 3] += 20  # an offset of every token: subtracting the mean removes it
    call.value[:, :, 7] *= 100  # one large token: every token has its own scale
    strided = call.with_tensors({"key": call.key.mT.contiguous().mT})
    before = strided.key.clone()
    found = dequantised(quantise_cache(strided.key, strided.value, dtype), 40)
    assert torch.equal(strided.key, before)
    for original, stored, largest in (
        (call.key, found[0], 8.0),
        (call.value, found[1], call.value.abs().amax(-1, keepdim=True).double()),
    ):
        assert ((stored - original.double()).abs() <= 1.01 * largest * ROUNDING[dtype]).all()


@each_dtype
@pytest.mark.parametrize("has_heavy_token", [False, True])
def test_high_and_low_parts_are_nearly_exact(has_heavy_token: bool, dtype: torch.dtype) -> None:
    """The high part alone would have an error of 3 %."""
    call = call_of(kv_len=600, head_dim=128)
    if has_heavy_token:
        call.key[:, :, 5] = 4 * call.query[:, ::2, 0]
        call.value[:, :, 5] *= 0.02
    key, value = dequantised(quantise_cache(call.key, call.value, dtype), 128)
    stored = call.with_tensors({"query": call.query.double(), "key": key, "value": value})
    expected = attention(stored)
    output = find(NAMES[dtype]).attention(**call.arguments()).double()
    rounding = 3e-4  # rounding error of float16
    assert (output - expected).norm() < {torch.int8: 2, FP8: 10}[dtype] * rounding * expected.norm()


VARIANTS = [
    AttentionVariant(),
    AttentionVariant(bottom_right=True),
    AttentionVariant(True, (200, None)),
    AttentionVariant(True, (70, 30), 2.0),
    AttentionVariant(window=(3, 40)),
]


@each_pair(
    variant=VARIANTS,
    q_len=[1, 5],
    is_causal=[False, True],
    extra=["none", "sinks", "lengths", "mask"],
    dtype=NAMES,
    is_prepared=[False, True],
)
def test_beyond_plain_attention(
    variant: AttentionVariant,
    q_len: int,
    is_causal: bool,
    extra: str,
    dtype: torch.dtype,
    is_prepared: bool,
) -> None:
    call = call_of(batch=2, q_len=q_len, is_causal=is_causal, variant=variant)
    mask = normal(2, 1, q_len, 270, dtype=torch.float16, seed=3)
    changes: dict[str, dict[str, Any]] = {
        "none": {},
        "sinks": {"sinks": normal(2, seed=7) * 3},
        "lengths": {"seqused_k": lengths(260, 3), "sinks": normal(4, seed=7)[::2]},
        "mask": {"attn_mask": mask if is_causal else mask > 0},
    }
    call = replace(call, **changes[extra])
    assert_attends_to_stored(call, dtype, is_prepared=is_prepared)


@each_pair(options=[PLAIN, AttentionOptions(True, (126, 0))], in_pages=[False, True], dtype=NAMES)
def test_keys_by_length(options: AttentionOptions, in_pages: bool, dtype: torch.dtype) -> None:
    """A window may begin anywhere in a block; the block is read from its first key."""
    used = lengths(0, 1, 128, 191, 270)
    call = call_of(batch=5, q_len=2, seqused_k=used)
    table = random_pages(call.key) if in_pages else None
    cache = quantise_cache(call.key, call.value, dtype, lengths=used, block_table=table)
    whole, assigned = (
        split_kv.attend_to_cache(
            call.query, cache, options=options, tiles=Tiling(64, 4, 1, 1, assignment)
        )
        for assignment in (None, KeyAssignment(shares=12, resident=12, least=1, worth=1e9))
    )
    assert not assigned[0].any()
    torch.testing.assert_close(assigned, whole, rtol=0, atol=2e-3)


@pytest.mark.parametrize(
    ("fields", "dtype"),
    [
        ({"kv_heads": 2}, torch.int8),
        (
            {
                "q_len": 5,
                "is_causal": True,
                "variant": AttentionVariant(True, (150, None)),
                "seqused_k": lengths(270, 130),
            },
            FP8,
        ),
        (
            {
                "head_dim": 40,
                "v_head_dim": 72,
                "dtype": torch.bfloat16,
                "seqused_k": lengths(1, 257),
            },
            torch.int8,
        ),
    ],
    ids=["plain", "window", "odd"],
)
def test_pages_change_no_bit(fields: dict[str, Any], dtype: torch.dtype) -> None:
    call = call_of(batch=2, **fields)
    table = random_pages(call.key)
    assert not torch.equal(table.flatten(), torch.arange(6, device=DEVICE).int())
    expected = find(NAMES[dtype]).attention(**call.arguments())
    paged = find(NAMES[dtype].replace("decode", "paged-decode"))
    for output in (paged.attention(**call.arguments()), paged.prepare(call)()):
        assert torch.equal(output, expected)


@each_dtype
def test_numbers_beyond_float16(dtype: torch.dtype) -> None:
    """Queries and the products of probabilities and value scales are outside float16's range."""
    call = call_of(dtype=torch.bfloat16)
    expected = quantised_decode(call.query, call.key, call.value, dtype=dtype)
    large, small = call.query * 2.0**30, call.value * 2.0**-30
    output = quantised_decode(large, call.key, small, dtype=dtype, scale=0.125 * 2.0**-30)
    torch.testing.assert_close(output * 2.0**30, expected)


@each_dtype
def test_invalid_tokens_are_not_read(dtype: torch.dtype) -> None:
    call = call_of(batch=2, seqused_k=lengths(130, 5))
    for is_prepared in (False, True):
        assert_attends_to_stored(call, dtype, is_prepared=is_prepared)
    expected = find(NAMES[dtype]).attention(**call.arguments())
    for tensor in (call.key, call.value):
        tensor[0, :, 130:] = math.nan
        tensor[1, :, 5:] = math.inf
    assert torch.equal(find(NAMES[dtype]).attention(**call.arguments()), expected)
    causal = call_of(is_causal=True)
    expected = find(NAMES[dtype]).attention(**causal.arguments())
    for tensor in (causal.key, causal.value):
        tensor[:, :, 1:] = math.nan  # these tokens are in a block that is read
    assert torch.equal(find(NAMES[dtype]).attention(**causal.arguments()), expected)


@pytest.mark.slow
@each_dtype
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("which", ["query", "key", "value"])
def test_nonfinite_numbers_spoil_their_heads(which: str, bad: float, dtype: torch.dtype) -> None:
    call = call_of(batch=2, q_heads=4, kv_heads=2)
    getattr(call, which)[1, 1, 0, 3] = bad
    is_nan = find(NAMES[dtype]).attention(**call.arguments()).isnan()
    spoilt = torch.zeros_like(is_nan)
    spoilt[1, 1 if which == "query" else slice(2, 4)] = True
    assert torch.equal(is_nan, spoilt)


def test_plans_depend_on_the_type_of_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program compiled for one type would misread pages of the other."""
    planned, plans = quantised_cache._planned, []
    monkeypatch.setattr(
        quantised_cache, "_planned", lambda *shape: plans.append(planned(*shape)) or plans[-1]
    )
    key = normal(2, 1, 200, 32).half()
    short, table = lengths(5, 200), random_pages(key)
    for used, pages in ((short, table), (short.long(), table), (short.long(), table.long())):
        for _ in range(2):
            cache = quantise_cache(key, key, torch.int8, lengths=used, block_table=pages)
            assert cache.key_scale[int(table[0, 1])].isfinite().all()
    assert [plans.index(each) for each in plans] == [0, 0, 0, 0, 4, 4]
