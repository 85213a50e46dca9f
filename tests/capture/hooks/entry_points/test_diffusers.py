"""Every backend of diffusers' dispatcher is recorded, and none is replaced by another."""

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FluxTransformer2DModel
from diffusers.models import attention_dispatch
from torch import Tensor

from capture import AttentionCall, load, record
from replay.accuracy.reference import attention
from tests.factories import normal


def model() -> Any:
    torch.manual_seed(0)
    return FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
    ).eval()


def step(denoiser: Any) -> Tensor:
    output: Tensor = denoiser(
        hidden_states=normal(1, 16, 4),
        encoder_hidden_states=normal(1, 8, 32, seed=1),
        pooled_projections=normal(1, 32, seed=2),
        timestep=torch.tensor([0.5]),
        img_ids=torch.zeros(16, 3),
        txt_ids=torch.zeros(8, 3),
    ).sample
    return output


@torch.no_grad()
def recorded(denoiser: Any, out: Path) -> list[AttentionCall]:
    """Return the two calls of a step; check that recording changed no bit."""
    expected = step(denoiser)
    with record(denoiser, out) as recording:
        assert torch.equal(step(denoiser), expected)
    calls = list(load(out))
    assert recording.seen == recording.kept == len(calls) == 2
    return calls


def mine(query: Tensor, key: Tensor, value: Tensor, scale: float | None = None, **_: Any) -> Tensor:
    query, key, value = (each.transpose(1, 2) for each in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return ((query @ key.mT * scale).softmax(-1) @ value).transpose(1, 2)


@pytest.fixture
def _own_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the backend `sage`, which needs a GPU, by plain PyTorch."""
    backend = attention_dispatch.AttentionBackendName.SAGE
    monkeypatch.setitem(attention_dispatch._AttentionBackendRegistry._backends, backend, mine)


@pytest.mark.usefixtures("_own_backend")
def test_backend_of_a_model_stays(tmp_path: Path) -> None:
    denoiser = model()
    for module in denoiser.modules():
        if hasattr(module, "processor"):
            module.processor._attention_backend = "sage"
    for call in recorded(denoiser, tmp_path / "calls"):
        assert (call.origin.entry_point, call.origin.backend) == ("diffusers", "diffusers.sage")
        assert call.output is not None
        assert torch.allclose(attention(call), call.output.double(), atol=1e-5)


def test_flex_runs_as_flex(tmp_path: Path) -> None:
    denoiser = model()
    denoiser.transformer_blocks[0].attn.processor._attention_backend = "flex"
    calls = recorded(denoiser, tmp_path / "calls")
    backends = {call.origin.entry_point: call.origin.backend for call in calls}
    assert backends.keys() == {"diffusers", "sdpa"}  # the other block has its own backend
    assert backends["diffusers"] == "flex"
