"""Layer that calls a library's function, and checks of its recordings."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from capture import AttentionCall, load, record
from capture.errors import RecordingWarning
from replay.accuracy.reference import attention


class Layer(nn.Module):
    """Layer that holds a reference to the function instead of looking it up in its module."""

    def __init__(self, function: Any, **options: Any) -> None:
        super().__init__()
        self.held = {"attend": function}
        self.options = options

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        output: Tensor = self.held["attend"](*args, **self.options, **kwargs)
        return output


def recorded(layer: Layer, out: Path, *args: Any, **kwargs: Any) -> AttentionCall:
    """Return the layer's only call; check that recording changed nothing and the call is right."""
    expected = layer(*args, **kwargs)
    with record(layer, out) as recording:
        assert torch.equal(layer(*args, **kwargs), expected)
    assert torch.equal(layer(*args, **kwargs), expected)
    assert (recording.seen, recording.problems) == (1, [])
    (call,) = load(out)
    assert call.output is not None
    assert torch.allclose(attention(call), call.output.double(), atol=1e-5)
    return call


def refusal(layer: Layer, out: Path, *args: Any, **kwargs: Any) -> str:
    """Return the reason why the layer's only call is not recorded."""
    with pytest.warns(RecordingWarning) as told, record(layer, out) as recording:
        layer(*args, **kwargs)
    assert (recording.seen, recording.kept) == (1, 0)
    (signature,) = recording.census.to_json()["signatures"]
    reason = str(signature["refusal"])
    assert f"none of 1 attention call can be stored: {reason}" in str(told[0].message)
    return reason
