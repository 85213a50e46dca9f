"""Sensitivity of the model's output to the errors of heads, from the gradients of a few runs.

The errors of single calls do not tell how much the output suffers: late steps may matter more than
early ones, and one head more than another. A sketch (`replay.sketches`) foretells the output's
error if a head alone is sparse in a range of steps. This over the error energy of the head is its
sensitivity. It is foretold at two sizes of the error, because it changes with them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from statistics import fmean
from typing import Any

from replay.plan.cells import Cell
from replay.sketches.sketch import ErrorSketch
from replay.sparsity.candidates import SparseCandidates
from replay.sparsity.sensitivity import Sensitivity
from replay.sparsity.settings import DENSE, named, shares_of

LEVELS = (0.5, 0.3)
"""Shares of the blocks that a sketch has errors for."""

DIRECTIONS = 16
"""Random directions of a sketch, over all prompts."""


def kernels_of(kernel: str) -> list[str]:
    """Return the names of the kernels that a sketch runs, for the kernel without options."""
    return [named(kernel, "keep", [share]) for share in LEVELS]


def by_head(kernel: str, heads: int) -> Sequence[str]:
    """Return the names of a kernel of `kernels_of` at each head alone."""
    _, (share,) = shares_of(kernel, 1)
    return [
        named(
            kernel.partition("[")[0],
            "keep",
            [share if each == head else DENSE for each in range(heads)],
        )
        for head in range(heads)
    ]


def with_sensitivities(
    candidates: SparseCandidates, cells: Iterable[Cell], sketch: ErrorSketch
) -> SparseCandidates:
    """Return candidates whose energies are squared errors of the output.

    Args:
        candidates: candidates whose energies are those of single calls.
        sketch: sketch by head, of the kernels `kernels_of`.
    """
    found: dict[tuple[str, int], Sensitivity] = {}
    for cell in cells:
        calls = sum(counted.calls for counted in cell.counted)
        heads = candidates.heads(cell)
        for head in range(heads):
            points = []
            for share, kernel in zip(LEVELS, kernels_of(candidates.kernel), strict=True):
                energy = fmean(
                    candidates.energy(call, "keep", share, head) for call in cell.captured
                )
                name = by_head(kernel, heads)[head]
                lost = sketch.foretell(partial(_at, cell, name)).error ** 2
                if energy > 0 and lost > 0:
                    points.append((energy, lost / (calls * energy)))
            if points:
                sensitivity = Sensitivity(tuple(sorted(points)))
                found |= {(call, head): sensitivity for call in cell.captured}
    return candidates.with_sensitivities(found)


def _at(cell: Cell, kernel: str, *place: Any) -> str:
    """Return the kernel inside the cell, and an empty text elsewhere."""
    return kernel if cell.covers(*place) else ""
