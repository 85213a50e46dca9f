"""Calls that a tuning records, and their size, known before they are recorded."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

import torch

from replay.plan.plan import DENOISE

PARTS = 4
"""Largest number of ranges of denoising steps that a plan may distinguish."""

SHARE = 0.5
"""Share of the free disk that a recording may take before fewer steps are recorded."""


def chosen_steps(census: Mapping[str, Any], free: int, most: int | None = None) -> list[int]:
    """Return the denoising steps to record: the middle of each equal part of all steps.

    Of two middle steps it is the earlier, as `replay.plan.cells.by_step` expects.

    Args:
        census: census of a run, as `capture.hooks.census.Census.to_json` writes it.
        free: bytes that are free on the disk.
        most: largest number of calls of these steps; None for no limit.

    Returns:
        As many steps as fit, at most `PARTS`, and at least one; empty if the model does not
        denoise.
    """
    rows = [row for row in census["rows"] if row["phase"] == DENOISE]
    if not rows:
        return []
    first = min(row["first_step"] for row in rows)
    number = max(row["last_step"] for row in rows) + 1 - first
    for parts in range(min(PARTS, number), 0, -1):
        steps = [first + (number * (2 * part + 1) - 1) // (2 * parts) for part in range(parts)]
        calls, _ = size({**census, "rows": rows}, steps)
        if size(census, steps)[1] <= SHARE * free and (most is None or calls <= most):
            break
    return steps


def size(census: Mapping[str, Any], steps: Collection[int]) -> tuple[int, int]:
    """Return the number and the bytes of the calls, if one call of each layer is recorded.

    A layer is a module in a phase, and in the phase `denoise` at each of the steps. Its largest
    call counts, with query, key, value, output and mask.
    """
    layers: dict[tuple[str, str, int], int] = {}
    for row in census["rows"]:
        nbytes = _bytes(census["signatures"][row["signature"]])
        at = [0]
        if row["phase"] == DENOISE:
            at = [step for step in steps if row["first_step"] <= step <= row["last_step"]]
        for step in at:
            layer = row["module"], row["phase"], step
            layers[layer] = max(layers.get(layer, 0), nbytes)
    return len(layers), sum(layers.values())


def _bytes(signature: Mapping[str, Any]) -> int:
    query, value = signature["query"], signature["value"]
    output = [*query[:-1], value[-1]]
    shapes = (query, signature["key"], value, output)
    elements = sum(math.prod(shape) for shape in shapes if min(shape) >= 0)
    nbytes = elements * _size(signature["dtype"])
    if signature["mask"] is not None:
        nbytes += math.prod(signature["mask"]) * _size(signature["mask_dtype"])
    return nbytes


def _size(dtype: str) -> int:
    return int(getattr(torch, dtype.removeprefix("torch.")).itemsize)
