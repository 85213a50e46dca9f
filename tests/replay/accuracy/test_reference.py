"""The reference is compared with a one-line formula and with torch's math backend."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from capture.call.attention_call import AttentionCall
from replay.accuracy.reference import attention, reference_dtype, same_dtype
from tests import factories
from tests.factories import sized_call


def random_call(**options: Any) -> AttentionCall:
    """Return a float64 call of sizes (2, 4, 2, 9, 13, 8, 8), with these options."""
    usual = {"batch": 2, "q_heads": 4, "kv_heads": 2, "head_dim": 8, "dtype": torch.float64}
    return factories.random_call(**{**usual, **options})


def torch_math(call: AttentionCall) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(**call.arguments())


@pytest.mark.parametrize("name", ["query", "key", "value"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("mask", ["none", "causal", "bool"])
@pytest.mark.parametrize("block_elements", [26, 2**24])
def test_rows_see_non_finite_inputs(name: str, bad: float, mask: str, block_elements: int) -> None:
    """Torch's math backend computes each row, from the keys that this row sees."""
    allowed = torch.rand(9, 13) > 0.5 if mask == "bool" else None
    call = random_call(is_causal=mask == "causal", attn_mask=allowed)
    call.tensors()[name][0, 1, 5, 3] = bad
    output = attention(call, block_elements=block_elements)
    if allowed is None:
        allowed = torch.ones(9, 13, dtype=torch.bool).tril(0 if mask == "causal" else 13)
    for row, seen in enumerate(allowed):
        alone = replace(
            call,
            query=call.query[:, :, [row]],
            key=call.key[:, :, seen],
            value=call.value[:, :, seen],
            attn_mask=None,
            is_causal=False,
        )
        torch.testing.assert_close(
            output[:, :, [row]], torch_math(alone), equal_nan=True, rtol=1e-12, atol=1e-12
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_same_dtype_rounds_as_torch_math_does_in_16_bits(dtype: torch.dtype) -> None:
    call = sized_call((1, 2, 2, 64, 64, 64, 64), dtype=dtype)
    before = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
    try:
        expected = torch_math(call)
    finally:
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(before)
    reference = attention(call)
    torch_error = (expected - reference).abs().mean()
    for output in same_dtype(call):
        assert output.dtype == dtype
        error = (output - reference).abs().mean()
        assert torch_error / 2 < error < torch_error * 2
        assert error > 2 * (reference.to(dtype) - reference).abs().mean()  # more than rounding


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [None, -0.3])
def test_same_dtype_has_a_form_with_scaled_scores(dtype: torch.dtype, scale: float | None) -> None:
    call = replace(sized_call((1, 1, 1, 4, 64, 32, 8), dtype=dtype), scale=scale)
    scores = (call.query @ call.key.mT) * call.softmax_scale
    expected = scores.softmax(-1) @ call.value
    before, after = same_dtype(call)
    distance, other = ((each - expected).double().abs().mean() for each in (after, before))
    assert distance < other / 4


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("sign", [1, -1])
def test_overflow_gives_nan_in_the_second_output_only(is_causal: bool, sign: int) -> None:
    """The second output is NaN even if all scores become -inf, which otherwise means "masked"."""
    call = sized_call((1, 1, 1, 4, 4, 64, 8), dtype=torch.float16)
    query, key = (torch.full_like(each, 40.0) for each in (call.query, call.key))
    query[:, :, 2] = 1.0
    large = replace(call, query=query * sign, key=key, is_causal=is_causal)
    before, after = same_dtype(large)
    assert before.isfinite().all()
    assert after[0, 0].isnan().all(-1).tolist() == [True, True, False, True]


def test_unequal_heads_are_refused() -> None:
    with pytest.raises(ValueError, match="3 query heads cannot share 2"):
        attention(random_call(q_heads=3, kv_heads=2))


@pytest.mark.parametrize(
    ("device", "capability", "call_dtype", "expected"),
    [
        ("cuda", (9, 0), torch.bfloat16, torch.float64),
        ("cuda", (8, 9), torch.bfloat16, torch.float32),
        ("cuda", (8, 9), torch.float32, torch.float64),
        ("cpu", None, torch.bfloat16, torch.float64),
        ("meta", None, torch.float32, torch.float32),
    ],
)
def test_reference_is_float64_where_that_is_fast(
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    capability: tuple[int, int],
    call_dtype: torch.dtype,
    expected: torch.dtype,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert reference_dtype(device, call_dtype) == expected


@pytest.fixture
def restored_precision() -> Iterator[None]:
    yield
    torch.set_float32_matmul_precision("highest")


@pytest.mark.usefixtures("restored_precision")
def test_float32_is_not_lowered_and_the_setting_comes_back() -> None:
    call = sized_call((1, 1, 1, 64, 64, 64, 64), dtype=torch.float32)
    exact = attention(call, torch.float32)
    torch.set_float32_matmul_precision("medium")
    assert torch.equal(attention(call, torch.float32), exact)
    assert torch.get_float32_matmul_precision() == "medium"
    assert torch.backends.cuda.matmul.fp32_precision == "tf32"


def test_memory_is_bounded_by_the_block() -> None:
    largest = 0

    class Recorder(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            if isinstance(result, Tensor) and func is not torch.zeros:
                largest = max(largest, result.numel())
            return result

    call = sized_call((1, 4, 2, 256, 256, 8, 8), dtype=torch.float64, is_causal=True)
    with Recorder():
        attention(call, block_elements=2**14)
    assert largest == 2**14
