"""Every backend of diffusers' dispatcher is recorded, and none is replaced by another."""

from dataclasses import replace
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


@pytest.mark.parametrize("mask", [None, torch.ones(1, 1, 8, 8, dtype=torch.bool).tril()])
def test_backend_of_a_model_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mask: Tensor | None
) -> None:
    """A mask that the backend does not take never reaches it, but is recorded."""
    registry = attention_dispatch._AttentionBackendRegistry
    backend, names = attention_dispatch.AttentionBackendName.SAGE, {"query", "key", "value"}
    monkeypatch.setitem(registry._backends, backend, mine)
    monkeypatch.setitem(registry._supported_arg_names, backend, names)

    class Layer(torch.nn.Module):
        def forward(self, each: Tensor) -> Any:
            dispatch = attention_dispatch.dispatch_attention_fn
            return dispatch(each, each, each, attn_mask=mask, backend=backend)

    layer, query = Layer(), normal(1, 8, 2, 16)
    expected = layer(query)
    with record(layer, tmp_path / "calls") as recording:
        assert torch.equal(layer(query), expected)
    (call,) = load(tmp_path / "calls")
    assert (call.origin.entry_point, call.origin.backend) == ("diffusers", "diffusers.sage")
    assert call.output is not None
    assert torch.allclose(attention(replace(call, attn_mask=None)), call.output.double(), atol=1e-5)
    if mask is None:
        assert (call.attn_mask, recording.problems) == (None, [])
        return
    assert torch.equal(call.attn_mask, mask)
    assert recording.problems == [
        "Layer, step 0: the model calls attention with invalid arguments: diffusers drops "
        "attn_mask, because its backend sage does not take one"
    ]
    assert registry._supported_arg_names[backend] == names


def test_flex_runs_as_flex(tmp_path: Path) -> None:
    denoiser = model()
    denoiser.transformer_blocks[0].attn.processor._attention_backend = "flex"
    calls = recorded(denoiser, tmp_path / "calls")
    backends = {call.origin.entry_point: call.origin.backend for call in calls}
    assert backends.keys() == {"diffusers", "sdpa"}  # the other block has its own backend
    assert backends["diffusers"] == "flex"
