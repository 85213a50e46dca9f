"""ComfyUI: a custom node, which overrides a model's attention by block, step and key length."""

from __future__ import annotations

import re

from replay.export.target import OURS, Ranges, Target, entries, loader
from replay.plan.plan import LayerChoice, Plan

KERNELS = {
    "torch-default": "pytorch",
    "fa2": "flash",
    "sage2": "sage",
    "sage3": "sage3",
    "xformers": "xformers",
    **OURS,
}

_BLOCK = re.compile(
    r"(?:\w+\.)?(?P<kind>single_|double_|)(?:transformer_)?(?:blocks|layers)"
    r"\.(?P<index>\d{1,9})(?:\.[a-z]\w*)*",
    re.ASCII,
)
"""Path of a module in a block of a transformer, in diffusers or in ComfyUI. Blocks of refiners and
of UNets have other paths; ComfyUI does not number the former, and the latter by level."""


def _place(choice: LayerChoice) -> tuple[str, int] | None:
    """Return type and index of a transformer's block."""
    block = _BLOCK.fullmatch(choice.module)
    if block is None or choice.phase != "denoise":
        return None
    return "single" if block["kind"] == "single_" else "double", int(block["index"])


def _text(plan: Plan, ranges: Ranges, steps: int | None) -> str:
    # ComfyUI gives the blocks of a transformer with one list either of the two types.
    has_two = "single" in {place[0] for place in map(_place, plan.choices) if place}
    lines = ["["]
    for first, places in ranges:
        if not has_two:
            places = {("", index): kernels for (_, index), kernels in places.items()}
        lines += [f"    ({first}, {{", *entries(places, KERNELS, "        "), "    }),"]
    return loader("comfyui_plan", "\n".join([*lines, "]"]))


TARGET = Target(
    "comfyui", KERNELS, _place, "calls of a block with these key lengths", _text, has_lengths=True
)
