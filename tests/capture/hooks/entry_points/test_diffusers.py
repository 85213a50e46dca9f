"""Every backend of diffusers' dispatcher is recorded, and none is replaced by another."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.models import attention_dispatch
from torch import Tensor

from capture import load, record
from replay.accuracy.reference import attention
from tests.capture.hooks.entry_points.layers import Layer, recorded
from tests.factories import normal

DISPATCH = attention_dispatch.dispatch_attention_fn


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
    layer = Layer(DISPATCH, attn_mask=mask, backend=backend)
    tensors = [normal(1, 8, 2, 16)] * 3
    expected = layer(*tensors)
    with record(layer, tmp_path / "calls") as recording:
        assert torch.equal(layer(*tensors), expected)
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


@pytest.mark.parametrize(
    ("backend", "origin"), [("flex", ("diffusers", "flex")), ("native", ("sdpa", "torch-flash"))]
)
def test_backend_s_kernel_is_named(backend: str, origin: tuple[str, str], tmp_path: Path) -> None:
    layer = Layer(DISPATCH, backend=attention_dispatch.AttentionBackendName(backend))
    call = recorded(layer, tmp_path / "calls", *[normal(1, 8, 2, 16)] * 3)
    assert (call.origin.entry_point, call.origin.backend) == origin
