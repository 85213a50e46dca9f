"""Function `export`, which writes a plan in the form of another library."""

from __future__ import annotations

from pathlib import Path

from replay.export.assignment import assign
from replay.export.exported import Exported
from replay.export.targets import TARGETS
from replay.plan.plan import Plan, PlanError
from replay.rows.replacement import replacing, why_not_written

MOST_STEPS = 10_000


def export(
    plan: str | Path | Plan,
    to: str,
    out: str | Path | None = None,
    *,
    steps: int | None = None,
) -> Exported:
    """Write a plan in the form that another library loads, and report what is lost.

    Args:
        plan: a file written by `replay tune` or `replay plan`, or a `Plan`.
        to: the library: `diffusers`, `transformers`, `comfyui`, `xdit` or `vllm`.
        out: the file to write, such as `attention_plan.py`; `-` for stdout, None for no file.
        steps: number of denoising steps, 1 to 10,000, which only `xdit` needs.

    Returns:
        The text, and the parts of the plan that the library cannot express with their costs. The
        string of the result is a summary.

    Raises:
        PlanError: the plan cannot be read or exported, the library is unknown, `steps` is missing,
            superfluous or out of range, or the file cannot be written.

    Example:
        >>> print(export("plan.json", "diffusers", "attention_plan.py"))
    """
    if to not in TARGETS:
        raise PlanError(f"unknown target {to!r}: choose from {', '.join(TARGETS)}")
    target = TARGETS[to]
    if target.needs_number_of_steps and steps is None:
        raise PlanError(
            f"{to} has a kernel for each denoising step: give their number by --steps 50 or "
            "steps=50"
        )
    if not target.needs_number_of_steps and steps is not None:
        raise PlanError(f"a plan for {to} does not depend on the number of steps: leave out steps")
    if steps is not None and not 1 <= steps <= MOST_STEPS:
        raise PlanError(f"invalid number of steps {steps} (must be 1-{MOST_STEPS:,})")
    if not isinstance(plan, Plan):
        plan = Plan.load(plan)
    plan, target = target.adapt(plan, target)
    ranges, losses = assign(plan, target)
    text = target.text(plan, ranges, steps)
    exported = Exported(to, text, plan.saved_ms, losses, plan.device, target.needs(text))
    if out is not None:
        try:
            with replacing(Path(out)) as file:
                file.write(exported.text)
        except OSError as error:
            raise PlanError(f"cannot write {out}: {why_not_written(error)}") from error
    return exported
