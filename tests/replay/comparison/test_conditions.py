"""Tests of the conditions of `--fail-on`: their syntax and their findings."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from replay.comparison.comparison import Comparison, compare
from replay.comparison.conditions import Condition, failures, read_conditions
from replay.comparison.row_matching import ComparisonError, Run
from replay.comparison.speed_change import NO_SPREAD
from replay.rows.row import Row
from tests.factories import call_facts, row
from tests.replay.comparison.simulated import judged, noisy, run


def compared(before: Sequence[Row], after: Sequence[Row]) -> Comparison:
    always = row("always", call_facts("common"))
    return compare(Run("before", [always, *before]), Run("after", [always, *after]), NO_SPREAD)


def failing(found: Comparison, text: str) -> list[str]:
    return failures([found], read_conditions(text))


def test_conditions_are_read() -> None:
    assert read_conditions("slow:3%, inaccurate") == [
        Condition("slow", 0.03),
        Condition("inaccurate"),
    ]
    assert read_conditions("slow:0.1,slow") == [Condition("slow", 0.1), Condition("slow")]
    assert read_conditions(None) == []


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("slower", "--fail-on slower: no such condition, choose from slow, inaccurate,"),
        ("slow:a", "--fail-on slow:a: not a share, write e.g. 3% or 0.03"),
        ("slow:-1%", "not a share"),
        ("slow:3", "not a share"),
        ("slow:nan", "not a share"),
        ("error:3%", "only slow takes a share"),
        (" , ", "--fail-on is empty"),
    ],
)
def test_unreadable_conditions_are_refused(text: str, sentence: str) -> None:
    with pytest.raises(ComparisonError, match=sentence):
        read_conditions(text)


def test_kernel_that_is_slow_only_over_all_its_calls_is_found() -> None:
    before = run("before", {"a": 0.5}, kernel_noise=0.06, calls=60)
    after = run("after", {"a": 0.5 * 1.08}, kernel_noise=0.06, calls=60)
    few = [each for each in compare(before, after, NO_SPREAD).pairs if each.speed]
    assert not all(each.speed and each.speed.is_slower_by(0.03) for each in few)
    none = [each for each in few if not (each.speed and each.speed.is_slower_by(0.03))]
    names = {each.before.call.name for each in none}
    kept = [
        Run(each.name, [one for one in each.rows if one.call.name in names])
        for each in (before, after)
    ]
    found = compare(*kept, NO_SPREAD)
    assert failing(found, "slow:3%") == ["slow:3%: a over all calls"]


def test_conditions_of_accuracy_find_what_became_worse() -> None:
    exact = judged(noisy(4, 16))
    worse = judged(noisy(4, 16, level=1.5e-3))
    wrong = replace(exact, status="inaccurate")
    assert failing(compared([exact], [exact]), "inaccurate,less-accurate") == []
    assert failing(compared([exact], [wrong]), "inaccurate") == ["inaccurate: mine on call"]
    assert failing(compared([exact], [worse]), "inaccurate") == []
    assert failing(compared([exact], [worse]), "less-accurate") == ["less-accurate: mine on call"]
    assert failing(compared([wrong], [exact]), "inaccurate,less-accurate") == []
    worse_still = replace(judged(noisy(4, 16), nan_count=1), status="inaccurate")
    assert failing(compared([wrong], [worse_still]), "inaccurate") == []
    assert failing(compared([exact], [judged(noisy(4, 16), nan_count=1)]), "inaccurate") != []


@pytest.mark.parametrize("status", ["error", "crash", "timeout", "out-of-memory"])
def test_error_is_found_if_the_kernel_ran_before(status: str) -> None:
    broken = replace(row("mine"), status=status)
    found = compared([row("mine")], [broken])
    assert failing(found, "error") == ["error: mine on call"]
    assert failing(found, "missing") == []
    assert failing(compared([broken], [broken]), "error") == []


def test_missing_rows_are_found() -> None:
    refused = replace(row("mine"), status="unsupported")
    assert failing(compared([row("mine")], [refused]), "missing") == ["missing: mine on call"]
    gone = compared([row("mine"), row("other")], [])
    assert failing(gone, "missing") == ["missing: mine on call, other on call"]
    assert failing(compared([], [row("mine")]), "missing") == []
