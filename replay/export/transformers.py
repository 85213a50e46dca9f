"""transformers: an attention function that chooses by module, phase and key length."""

from __future__ import annotations

from replay.export.target import OURS, Ranges, Target, entries, loader
from replay.plan.plan import LayerChoice, Plan

KERNELS = {
    "torch-default": "sdpa",
    "torch-math": "sdpa_math",
    "torch-flash": "sdpa_flash_attention",
    "torch-efficient": "sdpa_efficient_attention",
    "torch-cudnn": "sdpa_cudnn_attention",
    "fa2": "flash_attn",
    "fa3": "flash_attn_interface",
    "fa4": "flash_attn.cute",
    **OURS,
}


def _place(choice: LayerChoice) -> tuple[str, bool]:
    """Return the module, and True for the phase `decode`."""
    return choice.module, choice.phase == "decode"


def _text(plan: Plan, ranges: Ranges, steps: int | None) -> str:
    ((_, places),) = ranges
    lines = ["{", *entries(places, KERNELS, "    "), "}"]
    return loader("transformers_plan", "\n".join(lines))


TARGET = Target(
    "transformers",
    KERNELS,
    _place,
    "all steps of a module",
    _text,
    has_steps=False,
    has_lengths=True,
)
