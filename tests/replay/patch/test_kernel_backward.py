"""A kernel in a training step passes every gradient that the model needs, or is refused by name."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from capture.hooks.interceptor import TORCH_SDPA
from replay import register_kernel, use_kernel

from .conftest import scaling


class Attention(nn.Module):
    """Attention whose query, key and value have a projection each."""

    def __init__(self, trained: str) -> None:
        super().__init__()
        self.projections = nn.ModuleDict(
            {name: nn.Linear(16, 16) for name in ("query", "key", "value")}
        )
        for name, projection in self.projections.items():
            projection.requires_grad_(name in trained)

    def forward(self, states: Tensor) -> Tensor:
        heads = [each(states).unflatten(2, (2, 8)).mT for each in self.projections.values()]
        output: Tensor = torch.nn.functional.scaled_dot_product_attention(*heads).sum()
        return output


def forward_only(*args: Any, **options: Any) -> Tensor:
    with torch.no_grad():
        return TORCH_SDPA(*args, **options)


class Recomputing(torch.autograd.Function):
    """Twice the attention, whose backward calls attention again."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return 2 * torch.nn.functional.scaled_dot_product_attention(*tensors)

    @staticmethod
    def backward(ctx: Any, upper: Tensor) -> Any:
        with torch.enable_grad():
            leaves = [each.detach().requires_grad_() for each in ctx.saved_tensors]
            output = torch.nn.functional.scaled_dot_product_attention(*leaves)
        return torch.autograd.grad(output, leaves, 2 * upper)


def recomputing(query: Tensor, key: Tensor, value: Tensor, *_: Any, **options: Any) -> Tensor:
    output: Tensor = Recomputing.apply(query, key, value)
    return output


def without_key(query: Tensor, key: Tensor, *args: Any, **options: Any) -> Tensor:
    return TORCH_SDPA(query, key.detach(), *args, **options)


def refusing(*args: Any, **options: Any) -> Tensor:
    raise NotImplementedError("head_dim 64 only")


def refusing_backward(query: Tensor, *args: Any, **options: Any) -> Tensor:
    output = TORCH_SDPA(query, *args, **options)
    output.register_hook(refusing)
    return output


def raising(query: Tensor, *args: Any, **options: Any) -> Tensor:
    output = TORCH_SDPA(query, *args, **options)
    output.register_hook(lambda gradient: 1 // 0)
    return output


@pytest.mark.parametrize("trained", ["query key value", "key"])
@pytest.mark.parametrize(
    ("kernel", "factor", "reason"),
    [
        (scaling(2), 2, ""),
        (recomputing, 2, ""),
        (forward_only, 1, "has no backward pass"),
        (without_key, 1, ""),
        (refusing, 1, "head_dim 64 only"),
        (refusing_backward, 1, "head_dim 64 only"),
        (raising, 1, "gradients are needed, but its backward pass fails: ZeroDiv"),
    ],
)
@pytest.mark.parametrize("reentrant", [None, False])
@pytest.mark.filterwarnings("ignore:mine handled no call")
@torch.enable_grad()
def test_gradients_pass_or_the_kernel_is_refused(
    trained: str,
    kernel: Callable[..., Tensor],
    factor: int,
    reason: str,
    reentrant: bool | None,
) -> None:
    if kernel is without_key:
        is_cut = trained == "key"
        reason = "has no backward pass" if is_cut else "its backward returns no gradient of key"
    register_kernel("mine")(kernel)
    model, states = Attention(trained), torch.randn(1, 6, 16)
    parameters = [each for each in model.parameters() if each.requires_grad]
    wanted = torch.autograd.grad(model(states), parameters)
    with use_kernel("mine") as swap:
        for _ in range(2):
            output = (
                model(states)
                if reentrant is None
                else checkpoint(model, states, use_reentrant=reentrant)
            )
            found = torch.autograd.grad(output, parameters)
    torch.testing.assert_close(found, [factor * each for each in wanted])
    assert (swap.hits > 0, not swap.fallbacks) == (not reason, not reason)
    assert all(each.startswith(reason) for each in swap.fallbacks)


@pytest.mark.filterwarnings("ignore:mine handled no call")
def test_refusal_without_gradients_is_a_fallback() -> None:
    register_kernel("mine")(refusing)
    model, states = Attention("key"), torch.randn(1, 6, 16)
    with torch.no_grad(), use_kernel("mine") as swap:
        found = [model(states) for _ in range(2)]
    torch.testing.assert_close(found, 2 * [model(states).detach()])
    assert (swap.hits, swap.fallbacks) == (0, {"head_dim 64 only": 2})
