"""Runs on two types of GPU become one matrix, unless they cannot be merged."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from replay.comparison.device_types import across_devices
from replay.comparison.row_matching import ComparisonError, Run
from replay.report.device_tables import devices_markdown, left_out, matrices, print_devices
from replay.rows.row import CallFacts, Machine, Row
from replay.rows.row_files import write_jsonl
from tests.factories import call_facts, row, speedup_over
from tests.in_this_process import RunCli
from tests.printed import printed

CALLS = (call_facts("a", "layers.0"), call_facts("b", "layers.1"))


def rows_of(
    device: str, calls: Sequence[CallFacts] = CALLS, *, times: dict[str, float], cache: str = "warm"
) -> list[Row]:
    """Return rows of kernels with these times on every call; the baseline is `old`."""
    options = {"machine": Machine(device), "cache": cache, "speedup": speedup_over("old")}
    return [row(kernel, call, ms, **options) for call in calls for kernel, ms in times.items()]


H100 = rows_of("H100", times={"old": 10.0, "new": 5.0, "newer": 8.0})
H200 = rows_of("H200", times={"old": 6.0, "newer": 3.0, "new": 4.0})


def merged_cells(*runs: Sequence[Row]) -> dict[str, list[str]]:
    merged = across_devices([Run(f"run {at}", rows) for at, rows in enumerate(runs)])
    ((_, headings, lines),) = matrices(merged)
    assert headings == ["kernel", *merged.rows]
    return {line[0]: line[1:] for line in lines}


def test_fastest_of_each_device_is_marked() -> None:
    cells = merged_cells(H100, H200)
    assert [*cells] == ["new", "newer", "old"]
    assert cells["new"] == ["2.00× (2.00-2.00) fastest", "1.50× (1.50-1.50)"]
    assert cells["newer"] == ["1.25× (1.25-1.25)", "2.00× (2.00-2.00) fastest"]
    assert cells["old"] == ["baseline", "baseline"]


def test_kernels_that_are_wrong_or_absent_on_one_device_keep_a_cell() -> None:
    wrong = [replace(one, status="inaccurate") if one.kernel == "newer" else one for one in H200]
    cells = merged_cells(H100, [each for each in wrong if each.kernel != "new"])
    assert cells["newer"] == ["1.25× (1.25-1.25)", "inaccurate"]
    assert cells["new"] == ["2.00× (2.00-2.00) fastest", "not replayed"]
    assert cells["old"] == ["baseline", "baseline fastest"]


def test_only_common_calls_are_compared() -> None:
    more = rows_of("H200", [call_facts("c", "layers.2")], times={"old": 1.0, "new": 9.0})
    merged = across_devices([Run("one", H100), Run("two", [*H200, *more])])
    assert left_out(merged) == "left out: 1 call not replayed on every device"
    assert merged_cells(H100, [*H200, *more]) == merged_cells(H100, H200)


@pytest.mark.parametrize(
    ("runs", "sentence"),
    [
        ((H100, H100), "all rows are of H100: name the rows of another type of device too"),
        ((H100, H200, H200), "H200 has two rows of old on a"),
        (
            (H100, rows_of("H200", [call_facts("z")], times={"old": 1.0})),
            "H100 and H200 have no kernel on the same call in common",
        ),
        (
            (H100, rows_of("H200", times={"old": 1.0}, cache="cold")),
            "H100 was measured with --cache warm and H200 with --cache cold",
        ),
    ],
)
def test_runs_that_do_not_merge_are_refused(runs: Sequence[Sequence[Row]], sentence: str) -> None:
    with pytest.raises(ComparisonError, match=sentence):
        across_devices([Run(f"run {at}", rows) for at, rows in enumerate(runs)])


def test_each_device_has_tables_of_its_own() -> None:
    two = [replace(each, machine=Machine("[/x]")) for each in H200]  # not markup
    text = printed(print_devices, across_devices([Run("one", H100), Run("two", two)]))
    first, _, rest = text.partition("\n[/x]\n")
    second, _, matrix = rest.partition("kernels × devices")
    assert first.startswith("H100\n")
    for tables, ms in ((first, "5"), (second, "4")):
        (line,) = [line for line in tables.splitlines() if line.startswith("new ")]
        assert line.split()[1] == ms
    assert "2.00× (2.00-2.00) fastest" in matrix
    assert "[/x]" in matrix


def test_markdown_keeps_names_as_text() -> None:
    odd = [replace(each, kernel="a|<b>") if each.kernel == "new" else each for each in H100]
    text = devices_markdown(across_devices([Run("one", odd), Run("two", H200)]))
    assert "| kernel | H100 | H200 |" in text
    assert "<b>" not in text
    assert all(line.count(" | ") == 2 for line in text.splitlines() if line.startswith("| "))


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, rows in (("h100.jsonl", H100), ("h200.jsonl", H200)):
        with (tmp_path / name).open("w") as file:
            write_jsonl(rows, file)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("stored")
def test_command_writes_the_matrix_as_markdown(run_cli: RunCli) -> None:
    code, shown, _ = run_cli("devices", "h100.jsonl", "h200.jsonl", "--markdown", "table.md")
    assert code == 0
    assert "kernels × devices" in shown
    assert "2.00× (2.00-2.00) fastest" in Path("table.md").read_text()
    code, shown, err = run_cli("devices", "h100.jsonl", "h200.jsonl", "--markdown", "-")
    assert shown == Path("table.md").read_text()
    assert "kernels × devices" in err
    code, shown, err = run_cli("devices", "h100.jsonl", "h200.jsonl", "--markdown", "./h100.jsonl")
    assert (code, shown, "would overwrite" in err) == (2, "", True)
