"""A replay reports the changes since the previous replay of the same calls."""

from replay.report.rerun import changes
from tests.factories import call_facts, row

ONE, TWO = call_facts("one"), call_facts("two")


def test_changes_of_one_call_are_times_and_statuses() -> None:
    before = [row("a", ONE, 2.0), row("b", ONE, 1.0), row("gone", ONE, 1.0)]
    after = [row("a", ONE, 1.5), row("b", ONE, 1.0, status="inaccurate"), row("new", ONE, 1.0)]
    assert changes(before, after) == ["a: 2 → 1.5 ms", "b: 1 → 1 ms, ok → inaccurate"]


def test_several_calls_have_a_mean_ratio() -> None:
    before = [row("a", ONE, 1.0), row("a", TWO, 8.0)]
    after = [row("a", ONE, 2.0), row("a", TWO, 4.0, status="inaccurate")]
    assert changes(before, after) == ["a: 1 × the time over 2 calls, ok → inaccurate (1 call)"]
