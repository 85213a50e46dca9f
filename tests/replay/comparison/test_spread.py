"""Sources of the spread between two equal runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from replay.comparison.row_matching import ComparisonError
from replay.comparison.speed_change import NO_SPREAD, Spread
from replay.comparison.spread import read_spread
from replay.rows.row import Machine
from replay.rows.row_files import save_jsonl
from replay.selftest.all_checks import SelftestReport
from replay.selftest.result import Result
from tests.replay.comparison.simulated import HERE, run

BEFORE = run("before", {"a": 0.5})


def selftest(path: Path, machine: Machine = HERE, **figures: float) -> str:
    results = (Result("same kernel", True, ""), Result("run to run", True, "", figures=figures))
    path.write_text(json.dumps(SelftestReport(machine, results, None).to_json()))
    return str(path)


def test_a_share() -> None:
    assert read_spread(None, BEFORE) == NO_SPREAD
    assert read_spread("1.5%", BEFORE) == Spread(0.015, "--spread")
    assert read_spread("0.02", BEFORE) == Spread(0.02, "--spread")


def test_the_self_test(tmp_path: Path) -> None:
    given = selftest(tmp_path / "selftest.json", spread=0.04)
    assert read_spread(given, BEFORE) == Spread(0.04, f"self-test {given}")


def test_a_second_run(tmp_path: Path) -> None:
    path = tmp_path / "again.jsonl"
    save_jsonl(run("again", {"a": 0.5}).rows, path)
    spread = read_spread(str(path), BEFORE)
    assert 0 < spread.share < 0.01
    assert spread.source == str(path)
    by_time = read_spread(str(path), BEFORE, "time")
    assert by_time.share != spread.share


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "no such file, and not a share as 1.5%"),
        ("{}", "not what `replay selftest --json` or `replay --json` writes"),
        ("[", "not what `replay selftest --json`"),
        ('{"schema": 2}\n', "line 1: not a row"),
    ],
)
def test_spread_without_a_figure_is_refused(
    tmp_path: Path, content: str | None, sentence: str
) -> None:
    path = tmp_path / "file"
    if content is not None:
        path.write_text(content)
    with pytest.raises(Exception, match=sentence):
        read_spread(str(path), BEFORE)


def test_a_self_test_of_another_machine_or_without_the_figure(tmp_path: Path) -> None:
    path = tmp_path / "selftest.json"
    with pytest.raises(ComparisonError, match="is of GPU 2, and before of GPU 1"):
        read_spread(selftest(path, Machine(device="GPU 2"), spread=0.01), BEFORE)
    with pytest.raises(ComparisonError, match="not what `replay selftest --json`"):
        read_spread(selftest(path), BEFORE)
    with pytest.raises(ComparisonError, match="could not measure it"):
        read_spread(selftest(path, spread=1.5), BEFORE)
