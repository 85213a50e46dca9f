"""Kernels in models of other projects: each call runs the kernel or falls back with a reason."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from replay import use_kernel
from tests.capture.foreign.table import MODELS

pytestmark = pytest.mark.slow

REASONS = {
    ("torch-math", "Gemma 2"): "has no soft cap",
    **{
        ("torch-math", name): "has no attention sinks"
        for name in ("gpt-oss", "DeepSeek V4", "MiMo V2 Flash")
    },
}
"""Reason why a kernel does not run a model's calls, by kernel and model."""
ANSWERED = {("torch-math", "MiMo V2 Flash"): 3}
"""Number of calls that the kernel still runs: every other layer has no sinks."""


@pytest.mark.parametrize("name", MODELS)
def test_every_call_is_answered_or_falls_back(name: str) -> None:
    model = MODELS[name]
    _, run = model.build()
    calls = model.calls.total()
    with torch.no_grad():
        before = tensors(run())
        for kernel in ("torch-math", "eager"):
            with use_kernel(kernel) as swap:
                swapped = tensors(run())
            reason = REASONS.get((kernel, name))
            answered = ANSWERED.get((kernel, name), 0 if reason else calls)
            assert swap.fallbacks == ({reason: calls - answered} if reason else {}), kernel
            assert swap.hits == answered
            assert swap.entry_points.keys() == (model.entry_points if calls else set())
            for own, other in zip(before, swapped, strict=True):
                assert other.shape == own.shape
                assert (other.double() - own.double()).abs().max() <= allowed(own, name), kernel
        for own, again in zip(before, tensors(run()), strict=True):
            assert torch.equal(own, again)


def tensors(output: Any) -> list[Tensor]:
    return [each for each in tree_leaves(output) if isinstance(each, Tensor)]


def allowed(output: Tensor, name: str) -> float:
    """Return the allowed error: √precision times the largest value; 0 for tokens."""
    if not output.is_floating_point():
        return 0.0
    computed_in = torch.bfloat16 if "bfloat16" in name else output.dtype
    return float(output.abs().max()) * torch.finfo(computed_in).eps ** 0.5
