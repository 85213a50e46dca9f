"""Modules that compute attention are recognised by their class."""

from __future__ import annotations

import pytest
from torch import nn

from capture.hooks.attention_modules import is_attention


@pytest.mark.parametrize(
    ("name", "attends"),
    [
        ("LlamaAttention", True),
        ("BertSelfAttention", True),
        ("SDCascadeAttnBlock", True),
        ("AttentionBlock", True),
        ("AttnProcessor", False),
        ("AttentionNorm", False),
        # In some configurations, a UNet's blocks have no attention.
        ("ControlNetXSCrossAttnDownBlock2D", False),
        ("UNetMidBlock2DCrossAttn", False),
        ("AttnUpBlock2D", False),
        ("Linear", False),
    ],
)
def test_attention_modules_are_recognised_by_class_name(name: str, attends: bool) -> None:
    assert is_attention(type(name, (nn.Module,), {})()) is attends
