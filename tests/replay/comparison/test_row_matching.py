"""Rows are compared only if they come from the same kernel and call."""

from dataclasses import replace
from typing import Any

import pytest

from replay.comparison.row_matching import (
    ComparisonError,
    Difference,
    Run,
    check_settings,
    differences,
    match,
)
from replay.rows.row import Machine
from tests.factories import call_facts, row, unreadable


def test_rows_of_one_subject_are_paired_and_the_others_are_named() -> None:
    before = Run("before", [row("a"), row("b"), unreadable()])
    after = Run("after", [row("c"), row("b"), row("b", environment="other")])
    found = match(before, after)
    assert [(old.kernel, new.kernel) for old, new in found.pairs] == [("b", "b")]
    assert [each.kernel for each in found.missing] == ["a"]
    assert [str(each.id) for each in found.new] == ["c", "b@other"]
    assert before.unreadable == ["call"]


def test_recorded_backend_does_not_identify_a_call() -> None:
    before, after = (row("a", call_facts(backend=each)) for each in ("torch-flash", "torch-math"))
    assert len(match(Run("before", [before]), Run("after", [after])).pairs) == 1


def test_runs_without_common_rows_or_with_duplicates_are_refused() -> None:
    with pytest.raises(ComparisonError, match="before and after have no kernel on the same call"):
        match(Run("before", [row("a")]), Run("after", [row("b")]))
    with pytest.raises(ComparisonError, match="after has two rows of a on call: give each run"):
        match(Run("before", [row("a")]), Run("after", [row("a"), row("a")]))


def test_different_versions_are_listed_once_without_dead_workers() -> None:
    old = [row("a", machine=Machine(device="x", torch="1")), row("b", machine=Machine(device="x"))]
    new = [row("a", machine=Machine(device="x", torch="2")), row("b")]
    pairs = list(zip(old * 2, new * 2, strict=True))
    assert differences(pairs) == [Difference("this", "torch", "1", "2")]


@pytest.mark.parametrize(
    ("sentence", "fields"),
    [
        ("measured with --cache cold and after with", {"cache": "cold"}),
        ("measured with --calls-before 4 and after with", {"calls_before": 4}),
        ("timed by cuda-events and after by perf_counter: replay the", {"timer": "cuda-events"}),
    ],
)
def test_times_taken_in_another_way_are_refused(sentence: str, fields: dict[str, Any]) -> None:
    new = row("a", ms=1.0, cache="warm", calls_before=0, timer="perf_counter")
    old = replace(new, **fields)
    before, after = Run("before", [old]), Run("after", [new])
    with pytest.raises(ComparisonError, match=f"before was {sentence}"):
        check_settings([(old, new)], before, after)
    check_settings([(replace(old, time_ms=None), new)], before, after)
