"""With `invariant=True`, a sequence gets the same bits in any batch, padding and chunks."""

from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from attention_kernels import dispatch
from attention_kernels.decode import split_kv_plan
from attention_kernels.decode.kv_cache import Cache
from attention_kernels.decode.quantised_cache import quantise_cache
from attention_kernels.decode.split_kv import attend_to_cache
from attention_kernels.operators import attention
from attention_kernels.options import INVARIANT
from attention_kernels.quantised.quantised_prefill import quantised_prefill
from tests.attention_kernels.calls import DEVICE
from tests.attention_kernels.invariant_calls import decoded, different, inputs, masked, prefilled

SIZES = (4, 2, 32)


@pytest.fixture(autouse=True, scope="module")
def _rows_like_in_tensor_cores() -> Iterator[None]:
    """Let each row of the interpreter's products be summed in the same order, unlike in BLAS, let
    even short masks be scanned, and let short sequences have the maximum number of parts."""

    def product(left: Any, right: Any, dtype: Any) -> Any:
        return (left[:, :, None] * right[None]).sum(1, dtype=dtype)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(np, "matmul", product)
        patched.setattr(dispatch, "WORTH_LOOKING", 0)
        patched.setattr(split_kv_plan, "PROGRAMS_OF_SEQUENCE", 4)
        split_kv_plan.plan.cache_clear()
        yield
    split_kv_plan.plan.cache_clear()


@settings(max_examples=4, deadline=None, derandomize=True)
@given(
    chunks=st.lists(st.integers(64, 110), min_size=2, max_size=3),
    left=st.sampled_from([None, 20, 100, 150]),
    dtype=st.sampled_from([torch.float16, torch.float32]),
)
@example(chunks=[70, 64, 200], left=150, dtype=torch.bfloat16)
def test_prefill_is_invariant(chunks: list[int], left: int | None, dtype: torch.dtype) -> None:
    ends = list(accumulate(chunks))
    assert different(prefilled(SIZES, ends, True, dtype, window=(left, 0))) == []


@settings(max_examples=6, deadline=None, derandomize=True)
@given(
    used=st.lists(st.integers(1, 1300), min_size=1, max_size=3),
    q_len=st.integers(1, 3),
    left=st.sampled_from([None, 600]),
)
@example(used=[1, 512, 513, 1500], q_len=1, left=None)
def test_decode_is_invariant(used: list[int], q_len: int, left: int | None) -> None:
    assert different(decoded(SIZES, used, q_len, left, True)) == []


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16])
def test_masks_are_invariant(dtype: torch.dtype) -> None:
    assert different(masked((2, 1, 104), 208, 40, True, dtype)) == []


def test_otherwise_bits_depend_on_company_padding_and_chunks() -> None:
    found = different(prefilled(SIZES, [70, 352], False, window=(100, 0)))
    assert found == [
        "queries 0 to 70", "queries 70 to 352", "decoded queries 351 to 352",
        "decoded queries 73 to 80", "packed behind another", "padded on the left",
    ]  # fmt: skip
    assert different(decoded(SIZES, [600, 1300], 1, None, False))
    assert different(masked((2, 1, 104), 208, 40, False)) == ["masked"]


def test_compiled_code_is_invariant() -> None:
    tensors = inputs(SIZES, 1, 16, 1300)
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        plain, output = (
            compiled(*tensors, enable_gqa=True, invariant=invariant) for invariant in (False, True)
        )
    assert torch.equal(output, attention(*tensors, enable_gqa=True, invariant=True))
    assert not torch.equal(output, plain)


def test_8_bits_and_chosen_tokens_are_refused() -> None:
    query, key, value = inputs(SIZES, 1, 3, 130)
    chosen = torch.zeros(1, 2, 3, dtype=torch.int32, device=DEVICE)
    for cache in (quantise_cache(key, value, torch.int8), Cache(key, value, indices=chosen)):
        with pytest.raises(NotImplementedError, match="all tokens of a 16-bit cache"):
            attend_to_cache(query, cache, options=INVARIANT)
    for attend in (
        lambda: attention(query, key, value, enable_gqa=True, precision="int8", invariant=True),
        lambda: quantised_prefill(query, key, value, options=INVARIANT),
    ):
        with pytest.raises(NotImplementedError, match="8-bit kernels are not invariant"):
            attend()
