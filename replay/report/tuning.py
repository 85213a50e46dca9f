"""Closing sentence of a tuning."""

from __future__ import annotations

from collections.abc import Iterable

from replay.plan.plan import LayerChoice, Plan
from replay.plan.step_ranges import StepRange
from replay.report.cells import speedup_text
from replay.report.plan_tables import by_kernel, layers_of, of_phases
from replay.rows.row import Speedup
from replay.tune.quality import Quality


def closing_sentence(
    plan: Plan, speedup: Speedup, quality: Quality, seconds: float, path: str, judged_on: str
) -> str:
    """Describe a tuned plan, its speed, its quality and its kernels.

    For example, `1.14× (1.13-1.15) at PSNR 38.1 dB, judged on the run it was tuned on: triton-fp8
    in 18 of 30 layers; 40 s; plan.json`.

    Args:
        seconds: duration of the tuning.
        path: the plan's file.
        judged_on: runs that the quality was judged on, in words.
    """
    others = "" if quality.other_lengths is None else f" ({quality.other_lengths} not timed)"
    return (
        f"{speedup_text(speedup)} at {quality}, {judged_on}{others}: {used_kernels(plan)}; "
        f"{spent(seconds)}; {path}"
    )


def used_kernels(plan: Plan) -> str:
    """Describe where a plan's kernels run: `triton-fp8 in 18 of 30 layers from step 6`.

    Only layers with recorded calls count, such as those of a pipeline's denoiser.
    """
    covered = [each for each in plan.choices if each.covered]
    layers = layers_of(covered)
    own = plan.baseline
    used = (each for each in plan.choices if each.kernel != (each.baseline or own))
    parts = [
        f"{kernel} in {layers_of(choices)} of {layers} layer{'s' * (layers != 1)}"
        + of_phases(choices, covered)
        + _when(choices, plan.steps)
        for kernel, choices in by_kernel(used)
    ]
    return ", ".join(parts)


def _when(choices: Iterable[LayerChoice], steps: StepRange | None) -> str:
    """Describe the steps of a kernel's choices; empty for all steps.

    Args:
        steps: all steps of the plan; None if it names none.
    """
    ranges = {each.steps or steps for each in choices}
    if ranges == {steps}:
        return ""
    if len(ranges) > 1:
        return " at some steps"
    (run,) = ranges
    assert run is not None
    assert steps is not None
    return f" from step {run.first:,}" if run.last == steps.last else f" at {run}"


def spent(seconds: float) -> str:
    """Format a duration as `40 s` or `4 min 10 s`."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{max(rest, 1)} s"
