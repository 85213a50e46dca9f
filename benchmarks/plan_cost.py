"""Host time that a plan costs a call of attention, and the refusal of a CUDA graph in a plan."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

import attention_replay as ar
from benchmarks.plan_by_step import choice_of
from replay.plan.plan import Budget, Plan, PlanError
from replay.plan.step_ranges import StepRange

CALLS = 500
"""Calls of a forward; few enough that a GPU's queue of launches never blocks the host."""
ROUNDS = 25


class PlanCost(NamedTuple):
    """Microseconds that a call takes longer than without a plan, and the outcome of a capture."""

    plan_us: float
    """Cost of a plan without steps."""
    step_us: float
    """Further cost of choosing by the step."""
    cuda_graph: str


class Repeated(nn.Module):
    """Denoiser that only calls attention."""

    def forward(self, x: Tensor, timestep: float) -> None:
        """Call attention on `x` (B, H, S, D)."""
        for _ in range(CALLS):
            nn.functional.scaled_dot_product_attention(x, x, x)


def plan_cost(device: torch.device) -> PlanCost:
    """Measure the thread's processor time, in the shortest of several rounds."""
    model, x = Repeated(), torch.randn(1, 2, 64, 64, device=device)

    def run() -> None:
        model(x, timestep=0.5)

    plans = {"none": None, "plan": _plan(None), "steps": _plan(StepRange(0, 9))}
    us = dict.fromkeys(plans, float("inf"))
    for _ in range(ROUNDS):
        for name, plan in plans.items():
            with contextlib.nullcontext() if plan is None else ar.use_plan(plan, model):
                run()
                if device.type == "cuda":
                    torch.cuda.synchronize()
                began = time.thread_time()
                run()
                us[name] = min(us[name], 1e6 * (time.thread_time() - began) / CALLS)
    captured = _captured(run, model) if device.type == "cuda" else "no GPU"
    return PlanCost(us["plan"] - us["none"], us["steps"] - us["plan"], captured)


def _captured(run: Callable[[], None], model: nn.Module) -> str:
    """Try to capture a CUDA graph inside a plan with steps; return the sentence of the refusal."""
    try:
        with ar.use_plan(_plan(StepRange(0, 9)), model), torch.cuda.graph(torch.cuda.CUDAGraph()):
            run()
    except PlanError as error:
        return f"refused: {error}"
    return "captured, although it repeats one step"


def _plan(steps: StepRange | None) -> Plan:
    choice = choice_of("Repeated", "denoise", "torch-default", (64, 64), steps)
    return Plan("", "", Budget("cosine", -1.0), "torch-default", [choice])
