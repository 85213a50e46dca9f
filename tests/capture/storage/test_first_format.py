"""The format on disk is that of the first version.

`first_format/` was recorded by that version; `python -m tests.capture.storage.test_first_format`
records the same calls again.
"""

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from capture import load, record
from capture.storage.tensor_file import TensorFile
from tests import flash_attn_stand_in

RECORDED = Path(__file__).with_name("first_format")
LIBRARY = "flash_attn.flash_attn_interface"
VOLATILE = ("versions", "started", "checksum", "bytes", "file", "backend")
"""Keys whose values differ between runs."""
LATER = ("forward_index", "attention_share")
"""Keys that later versions add, and that the first version ignores."""


class HeldAttention(nn.Module):
    """Attention that holds a reference to its function, which recordings therefore miss."""

    def forward(self, states: Tensor, attend: Any = F.scaled_dot_product_attention) -> Tensor:
        heads = states.unflatten(-1, (2, 4)).transpose(1, 2)
        output: Tensor = attend(heads, heads, heads)
        return output.transpose(1, 2).flatten(2)


class Model(nn.Module):
    """Model with a masked call, a causal call, a library call, and a call that recordings miss."""

    def __init__(self) -> None:
        super().__init__()
        self.held = HeldAttention()

    def forward(self, states: Tensor) -> Tensor:
        batch, length, _ = states.shape
        heads = states.unflatten(-1, (2, 4))
        bhsd, value = heads.transpose(1, 2), heads.neg().transpose(1, 2)
        mask = torch.ones(1, 1, length, length, dtype=torch.bool).tril().expand(batch, 2, -1, -1)
        F.scaled_dot_product_attention(bhsd, bhsd, value, attn_mask=mask, scale=0.25)
        F.scaled_dot_product_attention(bhsd, bhsd, value, is_causal=True)
        flash_attn: Any = sys.modules[LIBRARY]
        options = {"causal": True, "window_size": (1, 0), "softcap": 2.0}
        flash_attn.flash_attn_func(heads[:, 1:], heads[:, :, :1], heads[:, :, 1:], **options)
        return states + self.held(states)


def record_calls(directory: Path) -> None:
    """Record the calls of one forward pass into a directory."""
    library = types.ModuleType(LIBRARY)
    vars(library)["flash_attn_func"] = flash_attn_stand_in.flash_attn_func
    model = Model().eval()
    states = (torch.arange(2 * 3 * 8, dtype=torch.float32).reshape(2, 3, 8) / 16).sin()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, LIBRARY, library)
        with record(model, directory, name="model", weights="none", seed=3, settings={"steps": 1}):
            model(states)


def manifest(directory: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((directory / "manifest.json").read_text())
    return content


def stable(value: Any) -> Any:
    """Return JSON with every key of the first version, without values that differ between runs."""
    if isinstance(value, dict):
        parts = {key: part for key, part in value.items() if key not in LATER}
        return {key: None if key in VOLATILE else stable(part) for key, part in parts.items()}
    return [stable(part) for part in value] if isinstance(value, list) else value


def test_recording_of_the_first_version_is_read_as_it_was_written() -> None:
    dataset, written = load(RECORDED), manifest(RECORDED)
    assert (dataset.note, dataset.damaged) == ("", [])
    assert [capture.to_json() for capture in dataset.captures] == written["captures"]
    # The entries are converted to JSON and back, because JSON has no tuples.
    assert json.loads(json.dumps([each.to_json() for each in dataset.entries])) == written["files"]
    assert [call.origin.module for call in dataset] == ["Model"] * 3
    assert dataset[2].variant.window == (1, None)


def test_new_recording_writes_the_same_keys_and_values(tmp_path: Path) -> None:
    record_calls(tmp_path)
    first, now = manifest(RECORDED), manifest(tmp_path)
    assert json.dumps(stable(now)) == json.dumps(stable(first))  # the keys have the same order
    for path in sorted(RECORDED.glob("*.safetensors")):
        with TensorFile.opened(path) as old, TensorFile.opened(tmp_path / path.name) as new:
            assert new.metadata.keys() == old.metadata.keys()
            assert new.metadata["format"] == old.metadata["format"]
            headers = [json.loads(each.metadata["attention-replay"]) for each in (old, new)]
            assert json.dumps(stable(headers[0])) == json.dumps(stable(headers[1]))
    for one, other in zip(load(RECORDED), load(tmp_path), strict=True):
        assert one.tensors().keys() == other.tensors().keys()
        for name, tensor in one.tensors().items():
            torch.testing.assert_close(other.tensors()[name], tensor)
            assert other.tensors()[name].stride() == tensor.stride()


if __name__ == "__main__":
    record_calls(RECORDED)
