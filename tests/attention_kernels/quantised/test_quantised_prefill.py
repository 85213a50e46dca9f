"""8-bit prefill agrees with attention on its dequantised operands, and with the reference."""

import ctypes
import functools
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from attention_kernels.launch import launcher as launch_module
from attention_kernels.launch.descriptors import at
from attention_kernels.launch.launcher import Launch, PlanCache
from attention_kernels.options import AttentionOptions
from attention_kernels.quantised import quantise as quantise_module
from attention_kernels.quantised import quantised_prefill as quantised_prefill_module
from attention_kernels.quantised.quantise import quantise_key_value
from attention_kernels.quantised.quantised_prefill import (
    attend_to_quantised,
    describable,
    quantised_prefill,
)
from capture.call.attention_call import AttentionCall
from capture.call.attention_variant import AttentionVariant
from replay.accuracy.errors import compare
from replay.accuracy.reference import attention
from replay.kernels.kernel_options import kernel_options
from replay.kernels.registry import find
from tests.attention_kernels import eager
from tests.attention_kernels.calls import DEVICE
from tests.attention_kernels.quantised.test_quantise import dequantised_key, dequantised_value

FP8 = torch.float8_e4m3fn
KINDS = {
    "sage": (torch.int8, False),
    "fp8": (FP8, True),
    "sage-fp8": (torch.int8, True),
    "fp8-scores": (FP8, False),
}
each_kind = pytest.mark.parametrize("kind", KINDS)

WEIGHTS_ERROR = {False: 2e-3, True: 2**-4}
"""Limit on the relative L1 error from rounding the probabilities, keyed by whether they are FP8:
half the distance of neighbouring e4m3 numbers, where a single key has all the weight."""


def beyond(
    *shape: int, is_causal: bool = True, has_sinks: bool = False, **options: Any
) -> tuple[tuple[int, ...], bool, AttentionVariant, bool]:
    return shape, is_causal, AttentionVariant(**options), has_sinks


BEYOND = {
    "window": beyond(1, 2, 1, 200, 200, 64, window=(50, 0)),
    "window of both sides": beyond(1, 2, 2, 140, 300, 40, is_causal=False, window=(30, 70)),
    "window of several blocks": beyond(1, 1, 1, 400, 400, 64, window=(200, 0)),
    "window of one key": beyond(1, 1, 1, 70, 70, 64, is_causal=False, window=(0, 0)),
    "bottom right": beyond(1, 2, 2, 100, 260, 64, bottom_right=True),
    "rows without keys": beyond(1, 2, 2, 260, 100, 64, bottom_right=True),
    "both": beyond(1, 2, 2, 70, 400, 96, bottom_right=True, window=(16, 0)),
    "soft cap": beyond(1, 2, 2, 90, 150, 64, softcap=5.0),
    "sinks": beyond(1, 4, 2, 70, 200, 64, has_sinks=True),
    "sinks, rows without keys": beyond(1, 2, 2, 90, 40, 64, bottom_right=True, has_sinks=True),
    "all": beyond(
        2, 2, 1, 70, 290, 80, bottom_right=True, window=(100, 0), softcap=8.0, has_sinks=True
    ),
}
"""Calls beyond SDPA: shape, causality, options, and presence of sinks."""


def random_call(
    *sizes: int, is_causal: bool = False, offset: float = 0.0, dtype: torch.dtype = torch.float16
) -> AttentionCall:
    """Return a call of sizes (B, Hq, Hkv, Sq, Sk, D), in which a token's heads are adjacent."""
    batch, q_heads, kv_heads, q_len, kv_len, head_dim = sizes
    generator = torch.Generator().manual_seed(kv_len)

    def normal(heads: int, length: int) -> Tensor:
        values = torch.randn((batch, length, heads, head_dim), generator=generator)
        return values.to(DEVICE, dtype).transpose(1, 2)

    key = normal(kv_heads, kv_len)
    key = key + offset * torch.randn(head_dim, generator=generator).to(DEVICE, dtype)
    query, value = normal(q_heads, q_len), normal(kv_heads, kv_len)
    return AttentionCall(query, key, value, is_causal=is_causal, enable_gqa=q_heads != kv_heads)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Repeat launches with addresses only, as on a GPU, but interpret the kernels."""
    if torch.cuda.is_available():
        pytest.skip("kernels are compiled where there is a GPU")
    first = Launch._first

    def compile_and_launch(launch: Launch, tensors: tuple[Any, ...]) -> Any:
        first(launch, tensors)
        return Interpreted(launch, tensors)

    monkeypatch.setattr(Launch, "_first", compile_and_launch)
    active = SimpleNamespace(get_current_stream=lambda device: 0)
    monkeypatch.setattr(launch_module, "driver", SimpleNamespace(active=active))
    planned = functools.lru_cache(quantise_module._planned.__wrapped__)
    monkeypatch.setattr(quantise_module, "_planned", planned)
    monkeypatch.setattr(quantised_prefill_module, "_calls", PlanCache())
    monkeypatch.setattr(quantised_prefill_module, "_repetitions", PlanCache())


class Interpreted:
    """Stand-in for a compiled kernel."""

    function = packed_metadata = None

    def __init__(self, launch: Launch, tensors: tuple[Any, ...]) -> None:
        self._launch, self._tensors = launch, tensors

    def run(self, *arguments: Any) -> None:
        grid, arguments = arguments[:3], arguments[9:]
        given, rest = arguments[: len(self._tensors)], arguments[len(self._tensors) :]
        tensors = map(self._at, self._tensors, given)
        self._launch._kernel[grid](*tensors, *rest, **self._launch._options)

    def _at(self, first: Any, given: Any) -> Any:
        """Return an argument of the launch, with the properties of the first launch's argument."""
        if first is None:
            assert given is None
            return None
        if not isinstance(first, Tensor):
            return at(first, self._at(first.base, given.base.data_ptr()))
        # The program was compiled for this alignment.
        assert (given % 16 == 0) == (first.data_ptr() % 16 == 0)
        extent = sum(
            (size - 1) * stride for size, stride in zip(first.shape, first.stride(), strict=True)
        )
        memory = (ctypes.c_uint8 * ((extent + 1) * first.element_size())).from_address(given)
        flat = torch.frombuffer(memory, dtype=torch.uint8).view(first.dtype)
        return flat.as_strided(first.shape, first.stride())


def quantised_query(call: AttentionCall, dtype: torch.dtype) -> Tensor:
    """Return the query times softmax's scale, after a round trip through 8 bits by row."""
    query = call.query.float() * (call.softmax_scale * math.log2(math.e))
    largest = query.abs().amax(dim=-1, keepdim=True).clamp_min(1e-12)
    if dtype == torch.int8:
        return (query * (1 / largest) * 127 + 0.5).floor() * largest / 127
    return (query * (1 / largest) * 448).to(dtype).float() * largest / 448


def run(call: AttentionCall, kind: str, smooth_k: bool = True) -> Tensor:
    score_dtype, fp8_value = KINDS[kind]
    return quantised_prefill(
        call.query,
        call.key,
        call.value,
        call.is_causal,
        scale=call.scale,
        score_dtype=score_dtype,
        fp8_value=fp8_value,
        smooth_k=smooth_k,
        options=kernel_options(call.variant),
        sinks=call.sinks,
    )


def check(call: AttentionCall, kind: str, smooth_k: bool = True) -> None:
    """Check that the output follows from the 8-bit operands and rounded probabilities."""
    score_dtype, fp8_value = KINDS[kind]
    quantised = quantise_key_value(call.key, call.value, score_dtype, fp8_value, smooth_k)
    expected = eager.attend(
        quantised_query(call, score_dtype),
        dequantised_key(quantised, call.query.shape[3]),
        dequantised_value(quantised),
        is_causal=call.is_causal,
        scale=math.log(2),
    ).output
    before = [each.clone() for each in (call.query, call.key, call.value)]
    output = run(call, kind, smooth_k)
    assert output.dtype == call.dtype
    torch.testing.assert_close([call.query, call.key, call.value], before, rtol=0, atol=0)
    errors = compare(output, expected)
    assert errors.mismatched_nonfinite == 0
    assert errors.relative_l1 < WEIGHTS_ERROR[fp8_value]


@pytest.mark.parametrize(
    ("kind", "shape", "is_causal"),
    [
        ("sage", (1, 2, 2, 128, 256, 64), False),
        ("fp8", (1, 2, 2, 128, 256, 64), False),
        ("sage-fp8", (2, 4, 2, 130, 150, 80), True),
        ("sage", (2, 4, 2, 130, 150, 80), True),
        ("fp8-scores", (1, 2, 1, 40, 127, 128), True),
        ("sage-fp8", (1, 2, 1, 40, 127, 128), True),
        ("fp8", (1, 1, 1, 127, 7, 96), True),
        ("fp8-scores", (1, 1, 1, 127, 7, 96), True),
        ("sage", (1, 1, 1, 1, 1, 40), False),
        ("fp8", (1, 1, 1, 1, 1, 40), False),
        ("sage-fp8", (1, 8, 2, 1, 300, 64), False),
    ],
)
def test_output_follows_from_operands(kind: str, shape: tuple[int, ...], is_causal: bool) -> None:
    check(random_call(*shape, is_causal=is_causal), kind)


@pytest.mark.parametrize(
    ("name", "kind", "smooth_k"),
    [
        (name, ("sage", "fp8", "sage-fp8")[(n + smooth_k) % 3], smooth_k)
        for n, name in enumerate(BEYOND)
        for smooth_k in (False, True)
    ],
)
def test_output_follows_from_the_operands_beyond_sdpa(name: str, kind: str, smooth_k: bool) -> None:
    """The keys share an offset, so that the subtracted mean affects caps and sinks."""
    shape, is_causal, variant, has_sinks = BEYOND[name]
    call = random_call(*shape, is_causal=is_causal, offset=2.0)
    sinks = torch.linspace(-3.0, 9.0, shape[1], device=DEVICE) if has_sinks else None
    call = AttentionCall(**{**call.arguments(), "sinks": sinks}, variant=variant)
    score_dtype, fp8_value = KINDS[kind]
    quantised = quantise_key_value(call.key, call.value, score_dtype, fp8_value, smooth_k, True)
    # The mean is not quantised, and the original query is multiplied with it.
    queries = [quantised_query(call, score_dtype)]
    keys = [dequantised_key(quantised, shape[5])]
    if quantised.key_mean is not None:
        queries.append(call.query.float() * (call.softmax_scale * math.log2(math.e)))
        mean = quantised.key_mean[:, :, None, : shape[5]]
        keys.append(mean.expand_as(keys[0]))
    stated = AttentionCall(
        torch.cat(queries, dim=-1),
        torch.cat(keys, dim=-1),
        dequantised_value(quantised),
        is_causal=is_causal,
        scale=math.log(2),
        enable_gqa=True,
        sinks=sinks,
        variant=variant,
    )
    output = run(call, kind, smooth_k)
    errors = compare(output, attention(stated))
    assert errors.mismatched_nonfinite == 0
    # A large sink makes a head's outputs small, so each head is judged by itself.
    assert errors.worst_head_relative_l1 < WEIGHTS_ERROR[fp8_value]
    if name == "rows without keys":
        assert not output[:, :, : shape[3] - shape[4]].any()


def test_a_cap_needs_the_mean_of_the_keys() -> None:
    call = random_call(1, 1, 1, 20, 30, 64)
    quantised, capped = quantise_key_value(call.key, call.value), AttentionOptions(softcap=5.0)
    with pytest.raises(ValueError, match="keep_mean"):
        attend_to_quantised(call.query, quantised, options=capped)
    unsmoothed = quantise_key_value(call.key, call.value, smooth_k=False)
    attend_to_quantised(call.query, unsmoothed, options=capped)


@pytest.mark.parametrize("name", ["triton-fp8", "triton-sage-fp8"])
def test_sums_in_the_tensor_cores_are_the_same_but_for_rounding(name: str) -> None:
    """The tensor cores' rounding cannot be tested here, only that the sum includes all blocks."""
    call = random_call(1, 2, 1, 140, 520, 64, is_causal=True)
    plain, tensor = find(name), find(f"{name}[accum=tensor]")
    expected = plain.attention(**call.arguments())
    for output in (tensor.attention(**call.arguments()), tensor.prepare(call)()):
        assert compare(output, expected).relative_l1 < 5e-3
    assert tensor.variant_of == name


@each_kind
def test_the_tile_of_gpus_without_tma(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantised_prefill_module, "has_tma", lambda device: False)
    check(random_call(1, 2, 1, 131, 197, 64, is_causal=True), kind)


def test_head_dim_256_and_narrow_values() -> None:
    call = random_call(1, 1, 1, 70, 130, 256)
    for kind in ("sage", "sage-fp8"):
        check(call, kind)
        check(call.with_tensors({"value": call.value[..., :72]}), kind)


@settings(max_examples=8, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(
    kind=st.sampled_from(["sage", "fp8", "sage-fp8"]),
    sizes=st.tuples(*(st.integers(1, most) for most in (2, 3, 2, 140, 270)), st.integers(2, 66)),
    is_causal=st.booleans(),
    scale=st.sampled_from([None, 0.3, -0.1, 0.0]),
    transposed=st.booleans(),
)
def test_any_shape_stride_and_scale(
    kind: str, sizes: tuple[int, ...], is_causal: bool, scale: float | None, transposed: bool
) -> None:
    batch, group, kv_heads, *lengths = sizes
    shape = (batch, group * kv_heads, kv_heads, *lengths)
    call = random_call(*shape, is_causal=is_causal)
    tensors = {name: getattr(call, name) for name in ("query", "key", "value")}
    if transposed:
        tensors = {name: tensor.mT.contiguous().mT for name, tensor in tensors.items()}
    else:
        tensors = {name: torch.cat([t, t], dim=-1)[..., ::2] for name, t in tensors.items()}
    arguments = {**call.arguments(), "scale": scale, **tensors}
    check(AttentionCall(**arguments), kind)


@pytest.mark.parametrize("kind", ["sage", "sage-fp8"])
def test_nan_in_a_query_is_its_row_s_alone(kind: str) -> None:
    call = random_call(1, 2, 2, 70, 90, 64)
    call.query[0, 1, 33, 5] = math.nan
    is_nan = run(call, kind).isnan()
    assert bool(is_nan[0, 1, 33].all())
    assert int(is_nan.sum()) == 64


def test_values_are_copied_only_where_a_descriptor_cannot_have_them() -> None:
    value = torch.zeros(2, 50, 3, 64, dtype=torch.bfloat16)
    for fits in (value, value.transpose(1, 2), value[:, 3:, 1:, 8:40], value[:1, :, :, :40]):
        assert describable(fits) is fits
    for odd in (value[..., 1:9], value[..., ::2], value.mT, value[:1].expand(2, -1, -1, -1)):
        copy = describable(odd)
        assert copy is not odd
        torch.testing.assert_close(copy, odd)
        assert all(stride % 8 == 0 for stride in copy.stride()[:3])


@each_kind
def test_a_second_call_of_a_shape_is_the_first_at_other_addresses(
    kind: str, compiled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (
        random_call(2, 4, 2, 70, 200, 40, is_causal=True, offset=offset) for offset in (0, 2)
    )
    expected = run(second, kind)
    run(first, kind)
    # Without the stored launches, a call would now fail.
    monkeypatch.setattr(quantised_prefill_module, "quantise_key_value", None)
    before = [each.clone() for each in (second.query, second.key, second.value)]
    torch.testing.assert_close(run(second, kind), expected, rtol=0, atol=0)
    torch.testing.assert_close([second.query, second.key, second.value], before, rtol=0, atol=0)
    with pytest.raises(TypeError):  # a new shape needs the removed function
        run(random_call(2, 4, 2, 70, 201, 40, is_causal=True), kind)


def test_calls_that_cannot_be_repeated_are_right(compiled: None) -> None:
    """The values are copied, addresses are not multiples of 16, or means are stored."""
    call = random_call(1, 2, 2, 70, 200, 64)
    odd = torch.empty(call.value.numel() + 1, dtype=call.dtype)[1:].view_as(call.value)
    odd.copy_(call.value)
    strided = call.value.repeat_interleave(2, dim=3)[..., ::2]
    for value in (odd, strided):
        for _ in range(3):
            check(replace(call, value=value), "sage")
    assert not quantised_prefill_module._repetitions._plans
    for sinks, variant in (
        (torch.zeros(2), AttentionVariant()),
        (None, AttentionVariant(softcap=5.0)),
    ):
        asked = replace(call, sinks=sinks, variant=variant)
        once, again = run(asked, "sage"), run(asked, "sage")
        torch.testing.assert_close(once, again, rtol=0, atol=0)
    assert not quantised_prefill_module._repetitions._plans
    check(call, "sage")
    assert quantised_prefill_module._repetitions._plans


def test_odd_addresses_do_not_repeat_what_was_compiled_for_others(compiled: None) -> None:
    """The launch is already compiled for multiples of 16, so it would load 16 bytes at once."""
    call = random_call(1, 2, 2, 70, 200, 64)
    room = torch.empty(call.key.untyped_storage().nbytes() // 2 + 1, dtype=call.dtype)
    odd = room.as_strided(call.key.shape, call.key.stride(), 1).copy_(call.key)
    check(call, "fp8")
    (shape,) = quantised_prefill_module._repetitions._plans
    for _ in range(3):
        check(replace(call, key=odd), "fp8")
    assert list(quantised_prefill_module._repetitions._plans) == [shape]
