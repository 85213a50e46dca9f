"""Plans for tests of exports, and the files that hold an exported plan."""

import types
from pathlib import Path
from typing import Any

from replay.api.export_plan import export
from replay.plan.key_lengths import KeyLengths
from replay.plan.plan import Budget, LayerChoice, Plan, Worst
from replay.plan.step_ranges import StepRange


def choice(
    module: str,
    kernel: str,
    saved_ms: float = 1.0,
    *,
    phase: str = "denoise",
    kv_lens: tuple[int, int] | None = None,
    steps: tuple[int, int] | None = None,
    error: float = 0.01,
    covered: bool = True,
    has_window: bool | None = None,
    **others: float,
) -> LayerChoice:
    """Return a choice that saves `saved_ms` per run, in one call a step, of 6 steps by default.

    Args:
        others: times that other kernels save per run, with `_` for `-` in their names.
    """
    calls = 6 if steps is None else steps[1] - steps[0] + 1
    return LayerChoice(
        module,
        phase,
        kernel,
        covered,
        inside=True,
        worst=Worst(cosine=1.0, relative_l1=error, rmse=0.0),
        time_ms=9.0,
        baseline_ms=10.0,
        saved_ms=saved_ms,
        calls=calls,
        captured=1,
        kv_lens=None if kv_lens is None else KeyLengths(*kv_lens),
        steps=None if steps is None else StepRange(*steps),
        has_window=has_window,
        others={name.replace("_", "-"): saved for name, saved in others.items()},
    )


def plan_of(*choices: LayerChoice) -> Plan:
    budget = Budget("relative_l1", 0.1)
    return Plan("model", "trained", budget, "torch-default", [*choices], device="NVIDIA H200")


def loaded(plan: Plan, to: str, folder: Path) -> Any:
    """Export a plan, and import the file as its user does.

    The file is compiled here: Python's cache takes two files of one length and second for the same.
    """
    path = folder / "attention_plan.py"
    export(plan, to, path)
    module = types.ModuleType("attention_plan")
    exec(compile(path.read_text(encoding="utf-8"), path, "exec"), module.__dict__)
    return module
