"""Closing sentence of a tuning."""

from __future__ import annotations

from collections import Counter

from replay.plan.plan import Plan
from replay.report.cells import speedup_text
from replay.rows.row import Speedup
from replay.tune.quality import Quality


def closing_sentence(
    plan: Plan, speedup: Speedup, quality: Quality, seconds: float, path: str, judged_on: str = ""
) -> str:
    """Return `1.14× (1.13-1.15) at PSNR 38.1 dB: triton-fp8 in 18 of 30 layers; 40 s; plan.json`.

    Args:
        seconds: duration of the tuning.
        path: the plan's file.
        judged_on: runs that the quality was judged on, in words; empty to leave this out.
    """
    judged = f" ({judged_on})" if judged_on else ""
    return (
        f"{speedup_text(speedup)} at {quality}{judged}: {used_kernels(plan)}; {spent(seconds)}; "
        f"{path}"
    )


def used_kernels(plan: Plan) -> str:
    """Describe where a plan's kernels run: `triton-fp8 in 18 and sage2 in 4 of 30 layers`.

    Only layers with recorded calls count, such as those of a pipeline's denoiser.
    """
    layers = len({(each.module, each.phase) for each in plan.choices if each.covered})
    places = {
        (each.kernel, each.module, each.phase)
        for each in plan.choices
        if each.kernel in plan.kernels and each.kernel != (each.baseline or plan.baseline)
    }
    used = Counter(kernel for kernel, *_ in places)
    parts = [f"{kernel} in {count}" for kernel, count in used.most_common()]
    return f"{' and '.join(parts)} of {layers} layer{'s' * (layers != 1)}"


def spent(seconds: float) -> str:
    """Format a duration as `40 s` or `4 min 10 s`."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{max(rest, 1)} s"
