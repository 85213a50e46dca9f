"""Times for github-action-benchmark."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from replay.report.benchmark_json import benchmark_entries
from replay.rows.row import Row
from tests.factories import call_facts
from tests.replay.comparison.simulated import BASELINE, run


def entries(rows: list[Row]) -> dict[str, dict[str, object]]:
    """Return the entries by kernel, after a round trip through a file."""
    found = json.loads(json.dumps(benchmark_entries(rows), allow_nan=False))
    return {str(each["name"]).partition(" · ")[0]: each for each in found}


def test_a_line_for_each_kernel_and_group_of_calls() -> None:
    rows = list(run("now", {"mine": 0.5}, calls=3).rows)
    found = entries(rows)
    assert set(found) == {BASELINE, "mine"}
    mine = found["mine"]
    assert set(mine) == {"name", "unit", "value", "range", "extra"}
    assert str(mine["name"]).startswith("mine · model · denoise · ")
    assert mine["unit"] == "ms"
    assert mine["value"] == pytest.approx(0.5, rel=0.01)
    low, _, high = str(mine["range"]).partition("-")
    assert float(low) < 0.5 < float(high)
    assert str(mine["extra"]).startswith("2.00× (")
    assert str(mine["extra"]).endswith(f" vs {BASELINE}, 3 calls, GPU 1")
    assert found[BASELINE]["extra"] == "3 calls, GPU 1"


def test_a_kernel_that_is_wrong_or_was_not_timed_has_none() -> None:
    rows = list(run("now", {"mine": 0.5, "wrong": 0.1, "untimed": 0.1}, calls=2).rows)
    wrong = [
        replace(each, status="inaccurate") if each.kernel == "wrong" else each for each in rows
    ]
    rows = [replace(each, time_ms=None) if each.kernel == "untimed" else each for each in wrong]
    assert set(entries(rows)) == {BASELINE, "mine"}


def test_lines_have_unique_names() -> None:
    rows = [
        replace(each, call=replace(each.call, name=weights, weights=weights))
        for weights in ("seed 1", "seed 2")
        for each in run("now", {"mine": 0.5}, calls=1).rows
    ]
    names = [each["name"] for each in benchmark_entries(rows)]
    assert len(set(names)) == len(names) == 4


def test_names_are_printable() -> None:
    (row, *_) = run("now", {"mine": 0.5}, calls=1).rows
    facts = call_facts(model="a\x1b[2J\n")
    (entry,) = benchmark_entries([replace(row, kernel="\x1b]x", call=facts)])
    assert entry["name"].isprintable()
