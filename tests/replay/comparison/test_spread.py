"""Sources of the spread between two equal runs."""

from pathlib import Path

from replay.comparison.speed_change import NO_SPREAD, Spread
from replay.comparison.spread import read_spread
from replay.rows.row_files import save_jsonl
from tests.replay.comparison.simulated import run

BEFORE = run("before", {"a": 0.5})


def test_spread_is_read_as_a_share() -> None:
    assert read_spread(None, BEFORE) == NO_SPREAD
    assert read_spread("1.5%", BEFORE) == Spread(0.015, "--spread")
    assert read_spread("0.02", BEFORE) == Spread(0.02, "--spread")


def test_spread_is_measured_by_a_second_run(tmp_path: Path) -> None:
    path = tmp_path / "again.jsonl"
    save_jsonl(run("again", {"a": 0.5}).rows, path)
    spread = read_spread(str(path), BEFORE)
    assert 0 < spread.share < 0.01
    assert spread.source == str(path)
    by_time = read_spread(str(path), BEFORE, "time")
    assert by_time.share != spread.share
