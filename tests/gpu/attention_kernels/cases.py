"""Calls with options beyond SDPA, shared by the tests of several Hopper kernels."""

from dataclasses import replace
from typing import Any

import torch

from capture.call.attention_call import AttentionCall
from capture.call.attention_variant import AttentionVariant
from tests.factories import normal, sized_call

BOTTOM_RIGHT = AttentionVariant(bottom_right=True)
BEYOND: dict[str, dict[str, Any]] = {
    "bottom right": {"is_causal": True, "variant": BOTTOM_RIGHT},
    "window": {"is_causal": True, "variant": AttentionVariant(True, (200, None))},
    "window shorter than a block": {
        "is_causal": True,
        "variant": AttentionVariant(True, (16, None)),
    },
    "window of one key": {"variant": AttentionVariant(False, (0, 0))},
    "window, top left": {"variant": AttentionVariant(False, (30, 70))},
    "window to the left": {"variant": AttentionVariant(True, (100, None))},
    "window to the right": {"variant": AttentionVariant(True, (None, 100))},
    "soft cap": {"is_causal": True, "variant": AttentionVariant(softcap=5.0)},
    "sinks": {"sinks": True},
    "all": {"is_causal": True, "variant": AttentionVariant(True, (90, None), 20.0), "sinks": True},
}
"""Options beyond SDPA."""


def call_with(
    options: dict[str, Any], sizes: tuple[int, int, int, int, int, int, int]
) -> AttentionCall:
    """Return a bfloat16 call of sizes (B, Hq, Hkv, Sq, Sk, D, Dv); `sinks` adds random sinks."""
    if "sinks" in options:
        options = {**options, "sinks": 2 * normal(sizes[1], seed=7, device="cuda")}
    return replace(sized_call(sizes, dtype=torch.bfloat16, device="cuda"), **options)
