"""Hand-made rows of sweeps: a baseline and a kernel with given speed-ups."""

from collections.abc import Sequence
from dataclasses import replace

from capture.call.shape import Shape
from replay.rows.row import Row, Status
from replay.timing.statistics import paired_speedup
from tests.factories import call_facts, row, speedup_over

LENGTHS = (512, 1024, 2048, 4096)
Ratio = float | Status


def call(name: str, ratio: Ratio, shape: Shape, noise: float = 0.001) -> list[Row]:
    """Return rows of the baseline and of a kernel with this speed-up, or status."""
    facts = replace(call_facts(name, "", "synthetic"), shape=shape)
    times = [1.0 + noise * (at % 3) for at in range(12)]
    rows = [row("base", facts, times, accuracy_class="exact")]
    if isinstance(ratio, str):
        return [*rows, row("mine", facts, 1.0, ratio, "reason")]
    own = [(1.0 + noise * (at % 5)) / ratio for at in range(12)]
    speedup = speedup_over("base", paired_speedup(times, own))
    return [*rows, row("mine", facts, own, speedup=speedup, accuracy_class="exact")]


def sweep(ratios: Sequence[Ratio], noise: float = 0.001, *, dim: int = 64, q: int = 0) -> list[Row]:
    """Return rows at growing numbers of keys, with as many queries, or with `q` of them."""
    shapes = [Shape(1, 8, 8, q or length, length, dim, dim) for length in LENGTHS]
    calls = zip(ratios, shapes, strict=False)
    return [each for ratio, shape in calls for each in call(str(shape), ratio, shape, noise)]
