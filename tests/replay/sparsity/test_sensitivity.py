"""Sensitivities of the output, from a sketch whose scores are known."""

import itertools
import math

import pytest
import torch

from replay.plan.choose import WithinTotal
from replay.plan.plan import Plan
from replay.sketches.sketch import ErrorSketch, Place
from replay.sparsity.candidates import SparseCandidates
from replay.sparsity.foretold_sensitivity import LEVELS, by_head, kernels_of, with_sensitivities
from replay.sparsity.sensitivity import Sensitivity
from replay.sparsity.settings import Setting, shares_of
from tests.factories import call_facts, row
from tests.replay.sparsity.test_candidates import COUNTED, EVERYTHING, examined_with

SETTINGS = [Setting("keep", share) for share in LEVELS]
WEIGHTS = dict(
    zip(itertools.product((0, 1), (0, 3), (0, 1)), (1, 8, 2, 5, 3, 9, 4, 0.5), strict=True)
)
"""Weight of the error of each head, by layer, step and head."""

Found = tuple[SparseCandidates, WithinTotal, SparseCandidates]


def test_sensitivity_is_interpolated_between_two_sizes_of_the_error() -> None:
    found = Sensitivity(((1.0, 2.0), (100.0, 8.0)))
    assert [found.at(energy) for energy in (0.01, 1.0, 10.0, 100.0, 1e6)] == pytest.approx(
        [2, 2, 4, 8, 8]
    )
    assert found.mean == pytest.approx(4)
    assert Sensitivity(((1.0, 3.0),)).at(7.0) == 3


def test_kernels_of_a_sketch_are_named_at_each_head_alone() -> None:
    assert kernels_of("sparse") == ["sparse[keep=0.5]", "sparse[keep=0.3]"]
    assert by_head("sparse[keep=0.3]", 3) == [
        "sparse[keep=0.3/1/1]",
        "sparse[keep=1/0.3/1]",
        "sparse[keep=1/1/0.3]",
    ]


@pytest.fixture(scope="module")
def found() -> Found:
    """Return candidates, the maker of plans, and the candidates with sensitivities."""
    calls = examined_with(SETTINGS)
    rows = [
        row("old", call_facts(name, f"layers.{name[0]}", step=int(name[2])), 10.0) for name in calls
    ]
    candidates = SparseCandidates("sparse", SETTINGS, calls)
    maker = WithinTotal(rows, COUNTED, EVERYTHING, "old", more=candidates)
    better = with_sensitivities(candidates, maker.cells, sketch_of(candidates))
    return candidates, WithinTotal(rows, COUNTED, EVERYTHING, "old", more=better), better


def sketch_of(candidates: SparseCandidates) -> ErrorSketch:
    """Return a sketch in which a head's squared error at a step is its energy times its weight.

    Four directions with opposite scores, each step with another sign, have no cross terms.
    """
    signs = torch.tensor([[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]])
    kernels = [name for kernel in kernels_of("sparse") for name in by_head(kernel, 2)]
    places = [Place(f"layers.{at}", "denoise", 64, step) for step in range(4) for at in range(2)]
    scores = torch.zeros(4, len(places), len(kernels))
    for at, place in enumerate(places):
        layer, step = int(place.module[-1]), 0 if place.step < 2 else 3
        for column, (share, head) in enumerate(itertools.product(LEVELS, range(2))):
            energy = candidates.energy(f"{layer} {step}", "keep", share, head)
            size = math.sqrt(2 * energy * WEIGHTS[layer, step, head])  # two calls a step
            scores[:, at, column] = size * signs[:, place.step]
    return ErrorSketch("toy", "relative_l2", kernels, places, [0] * 4, scores, scores[0] ** 2, 5)


def weighted(candidates: SparseCandidates, plan: Plan) -> float:
    """Return the energy of a plan, with a weight for each head."""
    total = 0.0
    for (layer, step, head), weight in WEIGHTS.items():
        kernel = plan.kernel_at(f"layers.{layer}", "denoise", 64, step)
        share = 1.0 if kernel == "old" else shares_of(kernel, 2)[1][head]
        total += 4 * weight * candidates.energy(f"{layer} {step}", "keep", share, head)
    return total


def test_energies_become_losses(found: Found) -> None:
    before, maker, after = found
    for (layer, step, head), weight in WEIGHTS.items():
        place = f"{layer} {step}", "keep", LEVELS[0], head
        assert after.energy(*place) == pytest.approx(weight * before.energy(*place), rel=1e-4)
    plan = maker.plan(1e9)
    assert plan.total_error is not None
    assert plan.total_error.error == pytest.approx(weighted(before, plan), rel=1e-4)
    assert after.scale(maker.cells[0]) == pytest.approx(math.sqrt(1 * 8), rel=1e-4)
