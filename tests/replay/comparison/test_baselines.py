"""Runs kept under a name, by type of machine, or in a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from replay.comparison.baselines import load, location, machine_of, machine_type, save
from replay.comparison.row_matching import ComparisonError
from replay.rows.row import Machine
from tests.factories import row

H200 = Machine(device="NVIDIA H200")
CPU = Machine(device="AMD EPYC (7763)", threads="8")


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))


def test_each_type_of_machine_has_its_own(tmp_path: Path) -> None:
    save("main", [row("gpu", machine=H200)], H200)
    save("main", [row("cpu", machine=CPU)], CPU)
    for kernel, machine in (("gpu", H200), ("cpu", CPU)):
        found = load("main", machine)
        assert (found.name, [each.kernel for each in found.rows]) == ("main", [kernel])
    there = tmp_path / "data" / "attention-replay" / "baselines"
    assert sorted(each.name for each in there.iterdir()) == [
        "amd-epyc-7763-8-threads",
        "nvidia-h200",
    ]
    save("main", [row("later", machine=H200)], H200)
    assert [each.kernel for each in load("main", H200).rows] == ["later"]


def test_without_the_variable_they_lie_in_the_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_DATA_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert location("main", H200).is_relative_to(tmp_path / ".local" / "share")


def test_a_path_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("here.jsonl", f"{tmp_path}/there"):
        save(name, [row("a")], H200)
        assert Path(name).is_file()
        assert [each.kernel for each in load(name, CPU).rows] == ["a"]
    with pytest.raises(ComparisonError, match=r"gone.jsonl: no such file"):
        load("gone.jsonl", H200)


def test_missing_baseline_names_the_existing_ones() -> None:
    with pytest.raises(ComparisonError, match="no baseline 'x' of NVIDIA H200: keep one with"):
        load("x", H200)
    save("nightly", [row("a")], H200)
    save("x", [row("a")], CPU)
    told = (
        r"NVIDIA H200: this type of machine has nightly and another type of machine has x "
        r"\(amd-epyc-7763-8-threads\)"
    )
    with pytest.raises(ComparisonError, match=told):
        load("x", H200)


@pytest.mark.parametrize("name", ["..", ".hidden", "a b", "x\x1b", "ü", "-x"])
def test_invalid_baseline_names_are_refused(name: str) -> None:
    with pytest.raises(ComparisonError, match="invalid baseline name"):
        save(name, [row("a")], H200)


def test_a_home_that_takes_no_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", "/dev/null")
    with pytest.raises(ComparisonError, match=r"directory\): name a file, e\.g\. main\.jsonl"):
        save("main", [row("a")], H200)


def test_a_run_without_rows_is_not_kept() -> None:
    with pytest.raises(ComparisonError, match="no rows to keep"):
        save("main", [], H200)


def test_the_machine_of_a_run_is_that_of_most_rows() -> None:
    rows = [row("a", machine=CPU), row("b", machine=H200), row("c", machine=H200), row("died")]
    assert machine_of(rows) == H200
    assert machine_of([]) == Machine()
    assert machine_type(Machine(device="../../x")) == "x"
    assert machine_type(Machine(device="…")) == "unknown"
