"""xDiT: one kernel for each denoising step, as `--hybrid_attn_schedule` takes them."""

from __future__ import annotations

from replay.export.target import Ranges, Target
from replay.plan.plan import LayerChoice, Plan, PlanError

KERNELS = {
    "torch-default": "SDPA",
    "torch-math": "SDPA_MATH",
    "torch-flash": "SDPA_FLASH",
    "torch-efficient": "SDPA_EFFICIENT",
    "torch-cudnn": "CUDNN",
    "fa2": "FLASH",
    "fa3": "FLASH_3",
    "fa3-fp8": "FLASH_3_FP8",
    "fa4": "FLASH_4",
    "sage2": "SAGE",
}

ALL = "all layers"


def _place(choice: LayerChoice) -> str | None:
    return ALL if choice.phase == "denoise" else None


def _text(plan: Plan, ranges: Ranges, steps: int | None) -> str:
    assert steps is not None
    if plan.baseline not in KERNELS:
        raise PlanError(f"xdit does not have {plan.baseline}, the attention of the plan's model")
    names: list[str] = []
    for step in range(steps):
        kernels = next(each for first, each in reversed(ranges) if first <= step)
        ((_, kernel),) = kernels.get(ALL, ((0, ""),))
        names.append(KERNELS[kernel or plan.baseline])
    return ",".join(names) + "\n"


TARGET = Target("xdit", KERNELS, _place, "all layers of a step", _text, needs_number_of_steps=True)
