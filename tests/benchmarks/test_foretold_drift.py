"""Figures of predictors, in hand-computed numbers, and random plans of a benchmark."""

import torch

from benchmarks.foretold_drift import KERNELS, plan_of, random_plans
from benchmarks.foretold_figures import PREDICTORS, figures, judged, spearman
from replay.sketches.sketch import ErrorSketch, Place


def line(plan: int, measured: float, foretold: float) -> dict[str, str]:
    numbers = {"plan": plan, "measured": measured, "foretold": foretold}
    numbers |= {"upper": foretold, "max": 10 * foretold}
    return {name: str(number) for name, number in numbers.items()} | {"half": str(plan % 2 == 0)}


LINES = [line(0, 0.1, 0.1), line(1, 0.01, 0.1), line(2, 0.001, 0.01), line(3, 1.0, 10.0)]
"""Errors of 0, 20, 20 and 20 dB."""


def test_errors_in_db() -> None:
    found = judged(LINES, "foretold")
    assert (found["median"], found["p90"], found["bias"]) == (20, 20, 15)
    assert found["passed"] == 0  # no error is larger than foretold


def test_budgets_that_a_foretold_error_passes_wrongly() -> None:
    # Foretold -40 dB, and -20 dB in fact: wrong for budgets of -40 and -30 dB, and not of -20 dB.
    lines = [line(0, 0.1, 0.01), line(1, 0.01, 0.01), line(2, 10**-1.5, 10**-1.5)]
    assert judged(lines, "foretold")["passed"] == 2 / 9


def test_a_constant_is_fitted_on_other_plans() -> None:
    # With factor 10, plans 0 and 1 are off by 20 and 40 dB, plans 2 and 3 by 40 and 40 dB.
    assert judged(LINES, "max")["bias"] == 0
    assert judged(LINES, "max")["p90"] == 20


def test_rank_correlation() -> None:
    assert spearman([1.0, 2.0, 3.0], [10.0, 20.0, 40.0]) == 1
    assert spearman([1.0, 2.0, 3.0], [3.0, 2.0, 1.0]) == -1


def test_prompts_are_compared_with_others() -> None:
    lines = [
        {**each, "model": "toy", "sketch_runs": "39", **dict.fromkeys(PREDICTORS, "0.1")}
        | {"upper": "0.1", "errors": f"0.1; {at}; 1; {100 * at}"}
        for at, each in enumerate(LINES, 1)
    ]
    # Geometric means √(0.1 at) and √(100 at), which are 30 dB apart.
    cells = figures(lines)["toy, 2 prompts measured, against 2 others"]
    assert cells[:7] == ["4", "2 a plan", "1.000", "nan", "30.0", "30.0", "-30.0"]


def test_random_plans_replace_half_of_the_places_in_every_second_plan() -> None:
    places = [Place(f"blocks.{at}", "denoise", 64, step) for step in range(3) for at in range(2)]
    ones = torch.ones(1, len(places), len(KERNELS))
    sketch = ErrorSketch("toy", "relative_l2", KERNELS, places, [0], ones, ones[0], 2)
    plans = random_plans(sketch, 20)
    assert {len(plan) for plan in plans[::2]} == {3}
    assert {len(plan) for plan in plans[1::2]} > {1, 6}
    for chosen in plans:
        plan = plan_of("toy", chosen)
        assert {place: plan.kernel_at(*place) for place in places if place in chosen} == chosen
        rest = [place for place in places if place not in chosen]
        assert all(plan.kernel_at(*place) == "torch-default" for place in rest)
