"""diffusers: a backend for each attention module, which a callback exchanges between steps."""

from __future__ import annotations

from replay.export.target import OURS, Ranges, Target, loader
from replay.plan.plan import LayerChoice, Plan

KERNELS = {
    "torch-default": "native",
    "torch-math": "_native_math",
    "torch-flash": "_native_flash",
    "torch-efficient": "_native_efficient",
    "torch-cudnn": "_native_cudnn",
    "flex": "flex",
    "fa2": "flash",
    "fa3": "_flash_3",
    "fa4": "flash_4_hub",
    "hub:kernels-community/flash-attn2": "flash_hub",
    "hub:kernels-community/flash-attn3": "_flash_3_hub",
    "sage2": "sage",
    "sage2-fp16-triton": "_sage_qk_int8_pv_fp16_triton",
    "sage2-fp16-cuda": "_sage_qk_int8_pv_fp16_cuda",
    "sage2-fp8-cuda": "_sage_qk_int8_pv_fp8_cuda",
    "sage2-fp8-sm90": "_sage_qk_int8_pv_fp8_cuda_sm90",
    "sage3": "sage_blackwell_hub",
    "xformers": "xformers",
    **OURS,
}


def _place(choice: LayerChoice) -> str | None:
    """Return the module; text encoders and autoencoders do not use diffusers' dispatcher."""
    return choice.module if choice.phase == "denoise" else None


def _text(plan: Plan, ranges: Ranges, steps: int | None) -> str:
    lines = ["["]
    for first, kernels in ranges:
        lines.append(f"    ({first}, {{")
        lines += [
            f"        {module!a}: {KERNELS[kernel]!a},"
            for module, ((_, kernel),) in kernels.items()
            if kernel
        ]
        lines.append("    }),")
    return loader("diffusers_plan", "\n".join([*lines, "]"]))


TARGET = Target("diffusers", KERNELS, _place, "all key lengths of a module", _text)
