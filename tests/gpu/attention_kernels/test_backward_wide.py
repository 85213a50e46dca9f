"""On a Hopper GPU, gradients at head dimensions above 128 are those of the formula.

The first call of a width, type and kind of mask compiles a program in a few seconds.
"""

from typing import Any

import pytest
import torch

import attention_kernels as ak
from tests.attention_kernels.gradients import Formula, assert_right, expected, gradients
from tests.factories import normal

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a Hopper GPU",
)

BOTTOM = ak.AttentionOptions(bottom_right=True)
CASES: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "one block": ((1, 1, 1, 64, 64), {}),
    "full": ((2, 4, 4, 512, 512), {}),
    "few queries": ((2, 4, 2, 5, 700), {}),
    "few keys": ((2, 4, 2, 700, 5), {}),
    "odd lengths": ((1, 3, 1, 449, 577), {}),
    "causal": ((2, 8, 2, 513, 513), {"is_causal": True}),
    "causal, more keys": ((1, 2, 1, 200, 500), {"is_causal": True}),
    "bottom right": ((2, 4, 1, 300, 700), {"is_causal": True, "options": BOTTOM}),
    "bottom right, more queries": ((1, 2, 2, 700, 300), {"is_causal": True, "options": BOTTOM}),
    "window": ((1, 4, 2, 700, 500), {"options": ak.AttentionOptions(True, (100, 20))}),
    "narrow window": ((1, 2, 2, 500, 500), {"options": ak.AttentionOptions(window=(3, None))}),
}


def inputs(sizes: tuple[int, ...], widths: tuple[int, int], dtype: torch.dtype) -> list[Any]:
    """Return query, key, value, and the gradients of the output and the log-sum-exp."""
    batch, heads, kv_heads, q_len, k_len = sizes
    dim, v_dim = widths
    shapes = (heads, q_len, dim), (kv_heads, k_len, dim), (kv_heads, k_len, v_dim)
    found = [
        normal(batch, *shape, dtype=dtype, seed=i, device="cuda")
        for i, shape in enumerate((*shapes, (heads, q_len, v_dim)))
    ]
    return [*found, normal(batch, heads, q_len, seed=5, device="cuda")]


def attend(*tensors: Any, **options: Any) -> Any:
    return ak.attention(*tensors, enable_gqa=True, return_lse=True, **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("widths", [(256, 256), (192, 128)], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_the_formula(
    name: str, widths: tuple[int, int], dtype: torch.dtype
) -> None:
    sizes, options = CASES[name]
    *tensors, above, below = inputs(sizes, widths, dtype)
    found = gradients(lambda *leaves: attend(*leaves, **options), tensors, above, below)
    assert_right(found, *expected(Formula(**options), tensors, above, below))


@pytest.mark.parametrize("widths", [(256, 256), (192, 128)], ids=str)
def test_gradients_of_keys_and_values_have_the_same_bits_in_1000_runs(
    widths: tuple[int, int],
) -> None:
    *tensors, above, _ = inputs((2, 8, 4, 1000, 1000), widths, torch.bfloat16)
    leaves = [each.requires_grad_() for each in tensors]
    output, _ = attend(*leaves, is_causal=True)
    first = torch.autograd.grad(output, leaves, above, retain_graph=True)
    for _ in range(1000):
        query, key, value = torch.autograd.grad(output, leaves, above, retain_graph=True)
        assert torch.equal(key, first[1])
        assert torch.equal(value, first[2])
        torch.testing.assert_close(query, first[0])
