"""Sensitivity of the model's output to the errors of heads, measured by runs of the model.

The errors of single calls do not tell how much the output suffers: late steps may matter more than
early ones, and one head more than another. In a run, one head is sparse in a range of steps, and
all others are the model's own. The loss of the output over the error energy of the head is its
sensitivity. It is measured at two sizes of the error, because it changes with them.

Groups of heads would need fewer runs, but heads of one layer differ as much as those of several.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import fmean

from replay.plan.choose import WithinTotal
from replay.plan.plan import Plan
from replay.sparsity.candidates import SparseCandidates
from replay.sparsity.sensitivity import Sensitivity
from replay.sparsity.settings import DENSE, named

LEVELS = (0.5, 0.3)
"""Shares of the blocks that a head keeps, each in a run of its own."""


def number_of_runs(candidates: SparseCandidates, maker: WithinTotal) -> int:
    """Return the number of runs that `with_sensitivities` takes."""
    return len(LEVELS) * sum(map(candidates.heads, maker.cells))


def with_sensitivities(
    candidates: SparseCandidates, maker: WithinTotal, loss: Callable[[Plan], float]
) -> SparseCandidates:
    """Return candidates whose energies are losses of the output.

    Args:
        candidates: candidates whose energies are those of single calls.
        maker: maker of plans from these candidates.
        loss: function that runs the model with a plan and returns the loss of its output, in
            proportion to the squared error; NaN if it is not known.
    """
    found: dict[tuple[str, int], Sensitivity] = {}
    for at, cell in enumerate(maker.cells):
        heads = candidates.heads(cell)
        for head in range(heads):
            points = []
            for share in LEVELS:
                shares = [share if each == head else DENSE for each in range(heads)]
                names = {at: named(candidates.kernel, "keep", shares)}
                total = maker.energy(names)
                of_call = fmean(
                    candidates.energy(call, "keep", share, head) for call in cell.captured
                )
                if total > 0 and 0 < (lost := loss(maker.plan_with(names))) < math.inf:
                    points.append((of_call, lost / total))
            if points:
                sensitivity = Sensitivity(tuple(sorted(points)))
                found |= {(call, head): sensitivity for call in cell.captured}
    return candidates.with_sensitivities(found)
