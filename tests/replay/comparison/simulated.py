"""Simulated runs: times from seeded generators, and given errors."""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from replay.comparison.row_matching import Run
from replay.rows.errors_of_output import Accuracy, Where
from replay.rows.row import Machine, Row, SpeedupOver, Status
from replay.timing.statistics import paired_speedup
from tests.factories import accuracy, call_facts, errors, row

BASELINE = "torch-default"
HERE = Machine(device="GPU 1", torch="2.9", python="3.12")


def run(
    name: str,
    kernels: Mapping[str, float],
    *,
    calls: int = 12,
    rounds: int = 30,
    machine_noise: float = 0.002,
    kernel_noise: float = 0.002,
    drift: float = 0.0,
    machine: Machine = HERE,
    **fields: Any,
) -> Run:
    """Return a run of kernels, each with its time as a multiple of the baseline's.

    Disturbances are shared within a round; `drift` applies to the whole run.
    """
    noise = random.Random(name)
    rows: list[Row] = []
    for call in range(calls):
        facts = call_facts(f"call-{call}", f"layers.{call}")
        of_round = [math.exp(drift + noise.gauss(0, machine_noise)) for _ in range(rounds)]
        times = {
            kernel: [factor * slow * math.exp(noise.gauss(0, kernel_noise)) for slow in of_round]
            for kernel, factor in {BASELINE: 1.0, **kernels}.items()
        }
        for kernel, ms in times.items():
            found = row(kernel, facts, ms, machine=machine, cache="cold", **fields)
            if kernel != BASELINE:
                against = SpeedupOver(**vars(paired_speedup(times[BASELINE], ms)), vs=BASELINE)
                found = replace(found, speedup=against)
            rows.append(found)
    return Run(name, rows)


def judged(
    places: Sequence[Sequence[float]] | None = None, status: Status = "ok", **figures: Any
) -> Row:
    """Return a row with the errors by head and range of queries, and those of the whole output."""
    whole: Accuracy = accuracy(errors(**{"relative_l1": 1e-3, **figures}))
    if places is not None:
        fields = tuple(tuple(each) for each in places)
        worst = max(map(max, fields))
        whole = replace(whole, where=Where(worst, worst, (0, 0), (0, 0), fields))
    return row("mine", status=status, accuracy=whole)


def noisy(
    heads: int, ranges: int, *, level: float = 1e-3, noise: float = 0.1, seed: int = 0
) -> list[list[float]]:
    """Return errors by head and range of queries, which differ only by noise."""
    draw = random.Random(seed)
    return [[level * math.exp(draw.gauss(0, noise)) for _ in range(ranges)] for _ in range(heads)]
