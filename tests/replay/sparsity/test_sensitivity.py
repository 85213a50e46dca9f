"""Sensitivities of the output, measured with a made-up loss."""

import itertools
import math

import pytest

from replay.plan.choose import WithinTotal
from replay.plan.plan import Plan
from replay.sparsity.candidates import SparseCandidates
from replay.sparsity.measured_sensitivity import LEVELS, number_of_runs, with_sensitivities
from replay.sparsity.sensitivity import Sensitivity
from replay.sparsity.settings import DENSE, Setting, shares_of
from tests.factories import call_facts, row
from tests.replay.sparsity.test_candidates import COUNTED, EVERYTHING, examined_with

SETTINGS = [Setting("keep", share) for share in LEVELS]
WEIGHTS = dict(
    zip(itertools.product((0, 1), (0, 3), (0, 1)), (1, 8, 2, 5, 3, 9, 4, 0.5), strict=True)
)
"""Weight of the error of each head, by layer, step and head."""


def test_sensitivity_is_interpolated_between_two_sizes_of_the_error() -> None:
    found = Sensitivity(((1.0, 2.0), (100.0, 8.0)))
    assert [found.at(energy) for energy in (0.01, 1.0, 10.0, 100.0, 1e6)] == pytest.approx(
        [2, 2, 4, 8, 8]
    )
    assert found.mean == pytest.approx(4)
    assert Sensitivity(((1.0, 3.0),)).at(7.0) == 3


@pytest.fixture(scope="module")
def found() -> tuple[SparseCandidates, WithinTotal, SparseCandidates]:
    """Return candidates, the maker of plans, and the candidates with sensitivities."""
    calls = examined_with(SETTINGS)
    rows = [
        row("old", call_facts(name, f"layers.{name[0]}", step=int(name[2])), 10.0) for name in calls
    ]
    candidates = SparseCandidates("sparse", SETTINGS, calls)
    maker = WithinTotal(rows, COUNTED, EVERYTHING, "old", more=candidates)

    def loss(plan: Plan) -> float:
        return weighted(candidates, plan)

    better = with_sensitivities(candidates, maker, loss)
    return candidates, WithinTotal(rows, COUNTED, EVERYTHING, "old", more=better), better


def weighted(candidates: SparseCandidates, plan: Plan) -> float:
    """Return the energy of a plan, with a weight for each head."""
    total = 0.0
    for (layer, step, head), weight in WEIGHTS.items():
        kernel = plan.kernel_at(f"layers.{layer}", "denoise", 64, step)
        share = 1.0 if kernel == "old" else shares_of(kernel, 2)[1][head]
        total += 4 * weight * candidates.energy(f"{layer} {step}", "keep", share, head)
    return total


def test_energies_become_losses(
    found: tuple[SparseCandidates, WithinTotal, SparseCandidates],
) -> None:
    before, maker, after = found
    for (layer, step, head), weight in WEIGHTS.items():
        place = f"{layer} {step}", "keep", LEVELS[0], head
        assert after.energy(*place) == pytest.approx(weight * before.energy(*place), rel=1e-6)
    plan = maker.plan(1e9)
    assert plan.total_error is not None
    assert plan.total_error.error == pytest.approx(weighted(before, plan), rel=1e-6)
    assert after.scale(maker.cells[0]) == pytest.approx(math.sqrt(1 * 8))


def test_plan_is_the_fastest_within_a_limit_of_the_loss(
    found: tuple[SparseCandidates, WithinTotal, SparseCandidates],
) -> None:
    before, maker, _ = found
    everything = maker.plan(1e9).total_error
    assert everything is not None
    assert everything.error is not None
    limit = 0.1 * everything.error
    plan = maker.plan(limit)
    assert weighted(before, plan) <= limit * (1 + 1e-6)
    shares = (*LEVELS, DENSE)
    energies = {
        (place, share): 4
        * weight
        * before.energy(f"{place[0]} {place[1]}", "keep", share, place[2])
        for (place, weight), share in itertools.product(WEIGHTS.items(), shares)
    }
    kept = [
        sum(choice)
        for choice in itertools.product(shares, repeat=len(WEIGHTS))
        if sum(energies[each] for each in zip(WEIGHTS, choice, strict=True)) <= limit
    ]
    visited = sum(
        share
        for (layer, step) in itertools.product((0, 1), (0, 3))
        for kernel in [plan.kernel_at(f"layers.{layer}", "denoise", 64, step)]
        for share in ([1.0, 1.0] if kernel == "old" else shares_of(kernel, 2)[1])
    )
    assert visited == pytest.approx(min(kept), abs=0.21)


def test_heads_whose_runs_failed_keep_the_energies_of_calls() -> None:
    calls = examined_with(SETTINGS)
    rows = [
        row("old", call_facts(name, f"layers.{name[0]}", step=int(name[2])), 10.0) for name in calls
    ]
    candidates = SparseCandidates("sparse", SETTINGS, calls)
    maker = WithinTotal(rows, COUNTED, EVERYTHING, "old", more=candidates)
    after = with_sensitivities(candidates, maker, lambda plan: math.nan)
    assert after.calls == candidates.calls
    assert number_of_runs(candidates, maker) == 4 * 2 * len(LEVELS)
    assert after.scale(maker.cells[0]) == 1
