"""FlexAttention is recorded when models call it directly."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from capture import load, record
from replay.accuracy.reference import attention
from tests.factories import normal

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


class Layer(nn.Module):
    """Layer that holds the function as a default argument."""

    def forward(
        self, query: Tensor, options: dict[str, Any], attend: Any = flex_attention
    ) -> Tensor:
        output: Tensor = attend(query, query, query, **options)
        return output


def window(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (q >= k) & (q - k < 3)


def by_value(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Return the mask's value, read from tensors by position, as document masks do."""
    return DOCUMENTS[q] == DOCUMENTS[k]


DOCUMENTS = torch.tensor([0, 0, 0, 1, 1, 1, 1, 2, 2])


@pytest.mark.parametrize("mask_mod", [window, by_value])
def test_block_mask_is_written_out(mask_mod: Any, tmp_path: Path) -> None:
    query = normal(1, 2, 9, 16)
    block_mask = create_block_mask(mask_mod, None, None, 9, 9, device="cpu")
    layer = Layer()
    with torch.no_grad(), record(layer, tmp_path / "calls") as recording:
        output = layer(query, {"block_mask": block_mask, "scale": 0.5})
    assert recording.problems == []
    (call,) = load(tmp_path / "calls")
    assert (call.origin.entry_point, call.origin.backend) == ("flex_attention", "flex")
    assert call.attn_mask is not None
    assert torch.allclose(attention(call), output.double(), atol=1e-5)


def test_score_mod_is_refused_by_its_name(tmp_path: Path) -> None:
    def alibi(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return score - (q - k)

    layer = Layer()
    with torch.no_grad(), record(layer, tmp_path / "calls") as recording:
        layer(normal(1, 2, 9, 16), {"score_mod": alibi})
    (signature,) = recording.census.to_json()["signatures"]
    assert "alibi" in signature["refusal"]
    assert recording.kept == 0


def test_mask_that_cannot_be_written_out_leaves_the_model_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> Tensor:
        raise RuntimeError("out of memory")

    query = normal(1, 2, 9, 16)
    block_mask = create_block_mask(window, None, None, 9, 9, device="cpu")
    monkeypatch.setattr("torch.nn.attention.flex_attention.create_mask", fails)
    layer = Layer()
    with torch.no_grad():
        expected = layer(query, {"block_mask": block_mask})
        with record(layer, tmp_path / "calls") as recording:
            assert torch.equal(layer(query, {"block_mask": block_mask}), expected)
    (signature,) = recording.census.to_json()["signatures"]
    assert signature["refusal"] == (
        "arguments of flex_attention could not be read: RuntimeError: out of memory"
    )
