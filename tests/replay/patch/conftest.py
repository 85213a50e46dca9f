"""Kernels that visibly change the output; compiler and registry are reset between tests."""

from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from typing import Any

import pytest
import torch
from torch import Tensor

from capture.hooks.interceptor import TORCH_SDPA
from replay import register_kernel
from replay.kernels import registry
from replay.plan.key_lengths import KeyLengths
from replay.plan.plan import Budget, LayerChoice, Plan
from replay.plan.step_ranges import StepRange


def _counters() -> Any:
    from torch._dynamo.utils import counters  # imported after TRITON_INTERPRET is set

    return counters


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run without gradients and an empty compiler cache, and forget the test's kernels."""
    monkeypatch.setattr(registry, "_kernels", registry.catalogue())
    torch.compiler.reset()
    _counters().clear()
    with torch.no_grad():
        yield
    torch.compiler.reset()


def graphs() -> int:
    """Return the number of different graphs compiled in this test."""
    return int(_counters()["stats"]["unique_graphs"])


def plan_of(
    *choices: tuple[str, str, str],
    kv_lens: Sequence[KeyLengths] = (),
    steps: Sequence[StepRange] = (),
) -> Plan:
    """Return a plan of (module, phase, kernel), for these ranges of key lengths and steps."""
    layers = [
        LayerChoice(*choice, True, True, None, None, None, 0.0, 1, 1, lengths, "", at)
        for choice, lengths, at in zip_longest(choices, kv_lens, steps)
    ]
    return Plan("model", "random", Budget("cosine", 0.9), "torch-math", layers)


def scaling(factor: int) -> Callable[..., Tensor]:
    """Return a kernel whose output is a multiple of the right one."""

    def scaled(*args: Any, **kwargs: Any) -> Tensor:
        attention: Tensor = factor * TORCH_SDPA(*args, **kwargs)
        return attention

    return scaled


@pytest.fixture
def scaled() -> None:
    """Register kernels `twice` and `thrice`, which return two or three times the right output."""
    register_kernel("twice")(scaling(2))
    register_kernel("thrice")(scaling(3))


@pytest.fixture
def doubling() -> str:
    """Register a kernel that returns twice the right output and takes no mask."""
    register_kernel(
        "doubling", unsupported=lambda call: "no mask" if call.attn_mask is not None else None
    )(scaling(2))
    return "doubling"


@pytest.fixture
def eightfold() -> str:
    """Register a kernel that returns eight times the right output, and supports masks."""
    register_kernel("eightfold")(scaling(8))
    return "eightfold"
