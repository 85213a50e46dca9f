"""Limits that the benchmark of tunings draws."""

from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.tuning_budgets import loss, most_careful, with_loss
from replay.tune.quality import METRICS


@pytest.mark.parametrize("metric", METRICS)
def test_loss_of_quality_is_inverted_and_grows_as_the_figure_gets_worse(metric: str) -> None:
    figures = (40.0, 20.0) if metric == "psnr" else (0.99, 0.9)
    if not METRICS[metric].is_minimum:
        figures = (1.01, 1.1)
    better, worse = (loss(metric, figure) for figure in figures)
    assert 0 < better < worse
    assert with_loss(metric, better) == pytest.approx(figures[0])


def test_most_careful_plan_is_of_the_smallest_limit_that_changes_a_kernel() -> None:
    def planner(limit: float) -> Any:
        return SimpleNamespace(limit=limit, kernels=["fp8"] if limit >= 0.3 else [])

    assert most_careful(planner, 1e-6, 1.0).limit == pytest.approx(0.3, rel=0.03)
