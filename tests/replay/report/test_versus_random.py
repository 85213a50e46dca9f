"""Recorded calls compared with their synthetic counterparts, with hand-made figures."""

from replay.report.versus_random import counterparts, print_versus_random
from replay.rows.row import Energy, GpuState, Row
from replay.workloads.synthetic_counterparts import KINDS
from tests import factories
from tests.factories import accuracy, call_facts, errors
from tests.printed import printed


def measured(name: str, weights: str, ms: float, error: float, watts: float | None) -> Row:
    return factories.row(
        "fast",
        call_facts(name, weights=weights),
        ms,
        speedup=factories.speedup_over(against=factories.speedup(6.0 / ms)),
        accuracy=accuracy(errors(relative_l1=error)),
        energy=None if watts is None else Energy(1.0, 1.0, watts, 1.0),
        gpu_during=GpuState(1980, 650.0, 60, ()),  # while every kernel took its turn
    )


def rows(watts: bool = True) -> list[Row]:
    of_twins = {kind: weights for kind, (weights, _) in KINDS.items()}
    figures = {  # milliseconds, error, watts; the third call has no synthetic counterpart
        "a": (3.0, 0.02, 600.0),
        "a-random": (2.0, 0.01, 500.0),
        "a-matched": (3.0, 0.04, 600.0),
        "b": (3.0, 0.04, 620.0),
        "b-random": (2.0, 0.01, 520.0),
        "b-matched": (3.0, 0.08, 620.0),
        "c": (100.0, 9.0, 100.0),
    }
    return [
        measured(
            name, of_twins.get(name.partition("-")[2], "trained"), ms, error, w if watts else None
        )
        for name, (ms, error, w) in figures.items()
    ]


def test_figures_are_medians_over_calls_that_have_all_counterparts() -> None:
    ((group, (fast,)),) = counterparts(rows())
    assert (group.weights, fast.kernel.name, fast.calls) == ("trained", "fast", 2)
    assert fast.figures == {
        "recorded": {"speed-up": 2.0, "rel L1": 0.03, "W": 610.0},
        "random": {"speed-up": 3.0, "rel L1": 0.01, "W": 510.0},
        "matched": {"speed-up": 2.0, "rel L1": 0.06, "W": 610.0},
    }


def test_power_is_that_of_the_kernel_alone() -> None:
    ((_, (fast,)),) = counterparts(rows(watts=False))
    assert fast.figures["recorded"]["W"] is None
    lines = printed(print_versus_random, rows(), width=100).splitlines()
    (line,) = [line for line in lines if line.startswith("fast")]
    assert line.split() == [
        *("fast", "2.00×", "1.50×", "1.00×"),
        *("3.0e-02", "0.33×", "2.00×"),
        *("610", "0.84×", "1.00×"),
    ]
