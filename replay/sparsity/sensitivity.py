"""Sensitivity of the model's output to the error of a head."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from statistics import fmean


@dataclass(frozen=True)
class Sensitivity:
    """Loss of the output for each unit of error energy, as a function of a head's energy."""

    points: tuple[tuple[float, float], ...]
    """Energies of a head in a call, smallest first, with the sensitivity there."""

    def at(self, energy: float) -> float:
        """Return the sensitivity, interpolated between logarithms and constant outside."""
        index = bisect_left(self.points, (energy, 0.0))
        if index in (0, len(self.points)):
            return self.points[min(index, len(self.points) - 1)][1]
        (low, one), (high, other) = self.points[index - 1 : index + 1]
        return one * (other / one) ** (math.log(energy / low) / math.log(high / low))

    @property
    def mean(self) -> float:
        """Geometric mean of the sensitivities."""
        return math.exp(fmean(math.log(sensitivity) for _, sensitivity in self.points))
