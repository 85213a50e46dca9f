"""A replay reports the changes since the previous replay of the same calls."""

from replay.report.rerun import NOISE, changes
from tests.factories import call_facts, row

ONE, TWO = call_facts("one"), call_facts("two")


def test_changes_of_one_call_are_times_and_statuses() -> None:
    before = [row("m.py:a", ONE, 2.0), row("b", ONE, 1.0), row("gone", ONE, 1.0)]
    after = [row("m.py:a", ONE, 1.5), row("b", ONE, 1.0, status="inaccurate"), row("new", ONE, 1.0)]
    assert changes(before, after) == ["m.py:a: 2 → 1.5 ms", f"b: 1 → 1 ms, ok → inaccurate{NOISE}"]


def test_several_calls_have_a_mean_ratio() -> None:
    before = [row("m.py:a", ONE, 1.0), row("m.py:a", TWO, 8.0)]
    after = [row("m.py:a", ONE, 2.0), row("m.py:a", TWO, 4.0, status="inaccurate")]
    assert changes(before, after) == ["m.py:a: 1 × the time over 2 calls, ok → inaccurate (1 call)"]
