"""Foretold error of a kernel or a plan by layer and step, and without its worst places."""

from __future__ import annotations

import math
from dataclasses import replace

from replay.plan.plan import LayerChoice, Plan
from replay.sketches.foretold_drift import ForetoldDrift
from replay.sketches.sketch import ErrorSketch, Foretold, KernelAt, Place

WORST = 3
"""Number of places that are kept exact, to tell what that gains."""


def foretold_drift(sketch: ErrorSketch, plan: Plan | KernelAt) -> ForetoldDrift:
    """Return the error that a sketch foretells for a plan, or for a function of the place.

    Raises:
        SketchError: the plan names a kernel that the sketch does not have.
    """
    found = sketch.foretell(plan)
    kernel_at = plan.kernel_at if isinstance(plan, Plan) else plan
    worst = sorted(found.by_place, key=lambda place: -found.by_place[place])[:WORST]
    without: Foretold | None = None
    costs_ms = None
    if len(found.by_place) > WORST:
        without = sketch.foretell(
            lambda *place: "" if Place(*place) in worst else kernel_at(*place)
        )
        costs_ms = _costs_ms(sketch, plan, worst) if isinstance(plan, Plan) else None
    # Text encoders also have a step 0.
    denoises = {place: each for place, each in found.by_place.items() if place.phase == "denoise"}
    steps = replace(found, by_place=denoises).share_by("step")
    return ForetoldDrift(
        found.error,
        found.measure,
        found.margin_db,
        _finite(found.psnr),
        {str(module): share for module, share in found.share_by("module").items()},
        {str(step): share for step, share in steps.items()},
        *_by_place(sketch, found),
        [_name(place) for place in worst],
        None if without is None else without.error,
        None if without is None else _finite(without.psnr),
        costs_ms,
    )


def _by_place(
    sketch: ErrorSketch, found: Foretold
) -> tuple[list[str], dict[str, list[float | None]]]:
    """Return the columns of `ForetoldDrift.by_place`, and the shares; both empty without error."""
    if not found.by_place:
        return [], {}
    shares: dict[tuple[str, str], float] = {}
    for place in sketch.places:
        cell = (place.module, _column(place))
        shares[cell] = shares.get(cell, 0.0) + found.by_place.get(place, 0.0)
    columns = list(dict.fromkeys(map(_column, sketch.places)))
    return columns, {
        module: [_rounded(shares.get((module, column))) for column in columns]
        for module in dict.fromkeys(place.module for place in sketch.places)
    }


def _column(place: Place) -> str:
    return str(place.step) if place.phase == "denoise" else place.phase


def _rounded(share: float | None) -> float | None:
    return None if share is None else float(f"{share:.3g}")  # keeps files of checks small


def _costs_ms(sketch: ErrorSketch, plan: Plan, worst: list[Place]) -> float | None:
    """Return the time that a plan saves at these places."""
    costs = 0.0
    for place in worst:
        choice = next((each for each in plan.choices if _covers(each, place)), None)
        if choice is None or choice.time_ms is None:
            return None
        covered = sum(_covers(choice, each) for each in sketch.places)
        costs += choice.saved_ms / covered
    return costs


def _covers(choice: LayerChoice, place: Place) -> bool:
    lengths, steps = choice.kv_lens, choice.steps
    return (
        (choice.module, choice.phase) == (place.module, place.phase)
        and (lengths is None or lengths.low <= place.kv_len <= lengths.high)
        and (steps is None or steps.first <= place.step <= steps.last)
    )


def _name(place: Place) -> str:
    if place.phase == "denoise":
        return f"{place.module}, step {place.step}"
    return f"{place.module}, {place.phase}, {place.kv_len} keys"


def _finite(figure: float | None) -> float | None:
    return figure if figure is not None and math.isfinite(figure) else None
