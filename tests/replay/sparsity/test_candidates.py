"""Shares of heads in a plan, compared with every possible choice."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from replay.plan.choose import WithinTotal
from replay.plan.plan import Budget, Plan
from replay.sparsity.block_errors import head_errors
from replay.sparsity.candidates import ExaminedCall, SparseCandidates
from replay.sparsity.pace import Pace
from replay.sparsity.settings import Setting, named, shares_of
from tests.factories import accuracy, call_facts, census, errors, random_call, row

ROWS, KEYS = 8, 8
SHARES = (0.25, 0.5, 1.0)
SETTINGS = [Setting("keep", share) for share in SHARES[:-1]]
PACE = Pace(0.1, 0.8)
EVERYTHING = Budget("relative_l1", 10.0)
COUNTED = census(("layers.0", "denoise", 64, 8), ("layers.1", "denoise", 64, 8), steps=4)


def recorded() -> dict[str, Any]:
    """Return calls of two layers at steps 0 and 3, whose heads are sparse to different degrees."""
    calls = {}
    for seed, (layer, step) in enumerate(itertools.product((0, 1), (0, 3))):
        call = random_call(q_len=64, kv_len=64, seed=seed)
        sharpness = torch.tensor([0.5 + seed, 3.0 - seed / 2]).view(1, 2, 1, 1)
        call = call.with_tensors({"query": call.query * sharpness})
        calls[f"{layer} {step}"] = call
    return calls


def examined_with(settings: Sequence[Setting]) -> dict[str, ExaminedCall]:
    policies = [each.policy for each in settings]
    return {
        name: ExaminedCall(head_errors(call, policies, ROWS, KEYS), PACE)
        for name, call in recorded().items()
    }


@pytest.fixture(scope="module")
def examined() -> dict[str, ExaminedCall]:
    return examined_with(SETTINGS)


def maker(examined: dict[str, ExaminedCall], **rows_of: float) -> WithinTotal:
    """Return a maker of plans whose baseline takes 10 ms a call; other kernels have times."""
    rows = []
    for name in examined:
        layer, step = name.split()
        call = call_facts(name, f"layers.{layer}", step=int(step))
        rows += [row(kernel, call, ms) for kernel, ms in {"old": 10.0, **rows_of}.items()]
    candidates = SparseCandidates("sparse", SETTINGS, examined)
    return WithinTotal(rows, COUNTED, EVERYTHING, "old", more=candidates)


def shares_in(plan: Plan) -> dict[tuple[str, int], list[float]]:
    """Return the shares of the heads at each layer and step."""
    found = {}
    for layer, step in itertools.product((0, 1), (0, 3)):
        kernel = plan.kernel_at(f"layers.{layer}", "denoise", 64, step)
        found[f"layers.{layer}", step] = [1.0, 1.0] if kernel == "old" else shares_of(kernel, 2)[1]
    return found


@pytest.mark.parametrize("share", [0.02, 0.1, 0.3, 0.6])
def test_plan_is_the_fastest_of_all_choices_within_the_limit(
    examined: dict[str, ExaminedCall], share: float
) -> None:
    make = maker(examined)
    largest = make.plan(1e9).total_error
    assert largest is not None
    assert largest.error is not None
    limit = share * largest.error

    def fits(choice: tuple[float, ...]) -> tuple[float, float]:
        """Return time and energy of shares of two heads at four cells with four calls each."""
        ms = energy = 0.0
        for name, heads in zip(examined, zip(choice[::2], choice[1::2], strict=True), strict=True):
            found = [None if head == 1 else SHARES.index(head) for head in heads]
            call = examined[name]
            density = sum(call.density(each, head) for head, each in enumerate(found)) / 2
            ms += 4 * 10 * (PACE.ratio(density) if any(head < 1 for head in heads) else 1.0)
            energy += 4 * sum(call.energy(each, head) for head, each in enumerate(found))
        return ms, energy

    totals = map(fits, itertools.product(SHARES, repeat=8))
    best = min(ms for ms, energy in totals if energy <= limit)
    plan = make.plan(limit)
    assert plan.total_error is not None
    assert plan.total_error.error <= limit  # type: ignore[operator]
    assert 160 - plan.saved_ms == pytest.approx(best, rel=1e-4)
    assert len({tuple(each) for each in shares_in(plan).values()}) > 1


def test_cell_keeps_a_dense_kernel_that_is_faster(examined: dict[str, ExaminedCall]) -> None:
    assert set(maker(examined, dense=1.0).plan(1e9).kernels) == {"dense"}
    plan = maker(examined, dense=8.0).plan(0.0)
    assert plan.kernels == ["dense"]
    assert [each.steps for each in plan.choices] == [None, None]


def test_one_setting_over_all_steps_is_one_choice(examined: dict[str, ExaminedCall]) -> None:
    plan = maker(examined).plan(1e9)
    assert [(each.kernel, each.steps) for each in plan.choices] == [("sparse[keep=0.25]", None)] * 2
    first = plan.choices[0]
    assert first.time_ms == pytest.approx(10 * PACE.ratio(0.25))
    assert (first.calls, first.captured) == (8, 2)


def test_errors_of_a_choice_are_those_of_the_output(examined: dict[str, ExaminedCall]) -> None:
    name, call = next(iter(recorded().items()))
    ((kept, dense),) = ([0, None],)
    found = examined[name].worst((kept, dense))
    masks = head_errors(call, [SETTINGS[0].policy], ROWS, KEYS).sums[0][0]
    everything = head_errors(call, [Setting("keep", 1.0).policy], ROWS, KEYS).sums[0]
    size = math.fsum(each.size for each in everything)
    assert found.relative_l1 == pytest.approx(masks.absolute / size)
    assert found.rmse == pytest.approx(math.sqrt(masks.squared / (2 * 64 * 32)))
    energy = examined[name].energy(kept, 0)
    assert energy == pytest.approx(found.rmse**2 / (size / (2 * 64 * 32)) ** 2)


def test_own_rounding_counts_in_a_sparse_cell(examined: dict[str, ExaminedCall]) -> None:
    rounding = accuracy(errors(mse=0.5, mae=1.0, relative_l1=1.0))
    rows = [
        row(
            "old", call_facts(name, f"layers.{name[0]}", step=int(name[2])), 10.0, accuracy=rounding
        )
        for name in examined
    ]
    candidates = SparseCandidates("sparse", SETTINGS, examined)
    make = WithinTotal(rows, COUNTED, EVERYTHING, "old", more=candidates)
    assert make.own_error == pytest.approx(16 * 0.5)
    assert not make.plan(make.own_error).kernels
    assert make.plan(1e9).total_error.error > make.own_error  # type: ignore[union-attr,operator]


def test_cell_with_a_call_that_was_not_examined_has_no_candidates(
    examined: dict[str, ExaminedCall],
) -> None:
    make = maker(examined)
    kernels = make.plan(1e9).kernels
    rest = {name: call for name, call in examined.items() if name != "0 3"}
    rows = [
        row("old", call_facts(name, f"layers.{name[0]}", step=int(name[2])), 10.0)
        for name in examined
    ]
    plan = WithinTotal(
        rows, COUNTED, EVERYTHING, "old", more=SparseCandidates("sparse", SETTINGS, rest)
    ).plan(1e9)
    assert plan.kernel_at("layers.0", "denoise", 64, 0) == kernels[0]
    assert plan.kernel_at("layers.0", "denoise", 64, 3) == "old"


def test_names_have_a_share_for_each_head() -> None:
    assert named("sparse", "keep", [0.2, 1.0, 0.5]) == "sparse[keep=0.2/1/0.5]"
    assert named("sparse", "mass", [0.9, 0.9]) == "sparse[mass=0.9]"
    assert shares_of("sparse[keep=0.2/1/0.5]", 3) == ("keep", [0.2, 1.0, 0.5])
    assert shares_of("sparse[mass=0.9]", 2) == ("mass", [0.9, 0.9])
