"""Attention that misses every entry point is reported, and stored in the manifest."""

import functools
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from capture import record
from capture.errors import RecordingWarning
from tests.capture.recording.callers import MakeLayers


def test_pytorch_s_fused_encoder_keeps_its_bits_and_is_missed(
    make_layers: MakeLayers, states: Tensor, tmp_path: Path
) -> None:
    layer = nn.TransformerEncoderLayer(16, 2, dim_feedforward=16, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 3).eval()
    padding = torch.tensor([[False] * 3 + [True] * 2])
    encoder.forward = functools.partial(encoder.forward, src_key_padding_mask=padding)
    model = nn.Sequential(encoder, make_layers())
    with torch.no_grad():
        expected = model(states)
        with record(model, tmp_path) as recording:
            assert torch.equal(model(states), expected)
    assert recording.seen == 2
    assert [str(each) for each in recording.missed_attention] == [
        "3 runs of 3 modules of class TransformerEncoderLayer (such as 0.layers.0)"
    ]
    assert recording.capture.attention_share is None


def test_remedy_that_cannot_work_is_not_given(tmp_path: Path) -> None:
    from transformers import BloomConfig, BloomModel

    model = BloomModel(BloomConfig(vocab_size=32, hidden_size=16, n_layer=1, n_head=2)).eval()
    with (
        pytest.warns(RecordingWarning, match="own code computes .* class BloomAttention") as warned,
        record(model, tmp_path),
    ):
        model(torch.arange(4)[None])
    assert "sdpa" not in str(warned[0].message)
