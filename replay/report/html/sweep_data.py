"""Data of the charts of sweeps: calls that differ only in length, and crossovers."""

from __future__ import annotations

from typing import Any

from replay.report.crossover import crossovers
from replay.report.matrix import Matrix
from replay.report.sweeps import sweeps


def sweep_data(found: Matrix) -> list[dict[str, Any]]:
    """Return each sweep with the index of its kinds of call, their lengths, and its crossovers."""
    return [
        {
            "title": sweep.title,
            "unit": sweep.unit,
            "kinds": list(sweep.lengths.values()),
            "lengths": list(sweep.lengths),
            "crossovers": [
                {
                    "kernel": str(kernel),
                    "ends": sorted((change.slower, change.faster)),
                    "isGain": change.is_gain,
                    "place": change.place,
                }
                for kernel, change in crossovers(found, sweep)
            ],
        }
        for sweep in sweeps(found.kinds)
    ]
