"""Recordings, kernels and plans work on models as users of diffusers prepare them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from diffusers.hooks import apply_group_offloading
from torch import Tensor, nn

from capture import load, record
from replay import use_kernel, use_plan
from tests.capture.hooks.entry_points.test_diffusers import model, step

from .conftest import plan_of

MODULES = ["transformer_blocks.0.attn", "single_transformer_blocks.0.attn"]


class LowRank(nn.Module):
    """LoRA as PEFT adds it: a layer that wraps the original layer."""

    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.lora_A = nn.Linear(base_layer.in_features, 2, bias=False)
        self.lora_B = nn.Linear(2, base_layer.out_features, bias=False)

    def forward(self, hidden_states: Tensor) -> Tensor:
        added: Tensor = self.lora_B(self.lora_A(hidden_states))
        base: Tensor = self.base_layer(hidden_states)
        return base + added


def offload_groups(denoiser: Any, offload_type: str) -> None:
    apply_group_offloading(
        denoiser, onload_device="cpu", offload_type=offload_type, num_blocks_per_group=1
    )


def offload_modules(denoiser: Any) -> None:
    """Offload modules as `enable_sequential_cpu_offload` does."""
    cpu_offload(denoiser, execution_device=torch.device("cpu"))


def add_lora(denoiser: Any) -> None:
    for name, module in list(denoiser.named_modules()):
        if name.endswith((".to_q", ".to_k", ".to_v")):
            denoiser.set_submodule(name, LowRank(module))


def store_in_eight_bits(denoiser: Any) -> None:
    denoiser.enable_layerwise_casting(
        storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32
    )


def compile_blocks(denoiser: Any) -> None:
    denoiser.compile_repeated_blocks(backend="eager", fullgraph=True)


CHANGES: dict[str, Callable[[Any], None]] = {
    "group offload, blocks": lambda denoiser: offload_groups(denoiser, "block_level"),
    "group offload, leaves": lambda denoiser: offload_groups(denoiser, "leaf_level"),
    "sequential offload": offload_modules,
    "LoRA": add_lora,
    "eight-bit storage": store_in_eight_bits,
    "compiled blocks": compile_blocks,
}


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(change, id=name, marks=[pytest.mark.slow] * (change is compile_blocks))
        for name, change in CHANGES.items()
    ],
)
def test_calls_are_recorded_and_exchanged(
    change: Callable[[Any], None], eightfold: str, tmp_path: Path
) -> None:
    denoiser = model()
    torch.manual_seed(1)
    change(denoiser)
    plan = plan_of((MODULES[0], "denoise", eightfold), (MODULES[1], "denoise", "torch-math"))
    with torch.no_grad():
        expected = step(denoiser)
        with record(denoiser, tmp_path / "calls") as recording:
            assert torch.equal(step(denoiser), expected)
        with use_kernel("torch-math") as swap:
            assert torch.allclose(step(denoiser), expected, atol=1e-5)
        with use_plan(plan, denoiser) as planned:
            assert not torch.allclose(step(denoiser), expected, atol=1e-3)
        assert torch.equal(step(denoiser), expected)
    calls = list(load(tmp_path / "calls"))
    assert (recording.seen, recording.problems, recording.missed_attention) == (2, [], [])
    assert {(call.origin.module, call.origin.phase) for call in calls} == {
        (module, "denoise") for module in MODULES
    }
    assert (swap.hits, swap.fallbacks) == (2, {})
    assert {name: tally.hits for name, tally in planned.kernels.items()} == {
        eightfold: 1,
        "torch-math": 1,
    }
    assert planned.missing == []
