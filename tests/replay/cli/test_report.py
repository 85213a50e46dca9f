"""Reports by `replay report`, by `--report` of a replay, and by the public function."""

import contextlib
import copy
import functools
import json
from operator import getitem
from pathlib import Path
from typing import Any

import pytest

import attention_replay as ar
from replay.api.write_report import read_checks, stored_checks
from replay.report.explanation import explanation
from replay.report.html import chart_library
from replay.report.html.model import answers, model_data
from replay.rows.row_files import RowsError, plain, write_jsonl
from tests.in_this_process import RunCli, refusal
from tests.replay.report.html import pages
from tests.replay.rows.test_row_files import parts

RANDOM = ("random", "-hq", "2", "-sq", "33", "-d", "32", "--kernels", "torch-math")
QUICK = ("--rounds", "6", "--device", "cpu", "--in-process")


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    with path.open("w") as file:
        write_jsonl(pages.rows(3, 2), file)
    return path


def test_replay_writes_its_report(run_cli: RunCli, tmp_path: Path) -> None:
    pytest.importorskip("vl_convert")
    out, rows = tmp_path / "out.html", tmp_path / "rows.jsonl"
    code, shown, err = run_cli(*RANDOM, *QUICK, "--report", str(out), "--json", str(rows))
    assert code == 0
    assert f"report: {out}" in err
    assert "torch-math" in shown
    assert shown.splitlines()[0] in out.read_text("utf-8")  # the answer
    roofs = [json.loads(line)["roof"] for line in rows.read_text().splitlines()]
    assert all(roof["tflops"] > 0 for roof in roofs)


def test_stored_rows_become_a_page(run_cli: RunCli, stored: Path) -> None:
    pytest.importorskip("vl_convert")
    out, checks = stored.with_name("out.html"), stored.with_name("checks.jsonl")
    checks.write_text("".join(json.dumps(each) + "\n" for each in pages.checks("kernel-1")))
    code, _, err = run_cli("report", str(stored), "-o", str(out), "--checks", str(checks))
    assert (code, err.splitlines()) == (0, [f"report: {out} ({out.stat().st_size / 1e6:.1f} MB)"])
    assert "one denoising step: kernel-1 1.10×" in out.read_text("utf-8")
    code, page, err = run_cli("report", str(stored), "-o", "-")
    assert (code, page[:15], err) == (0, "<!doctype html>", "")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("nowhere.jsonl", "-o", "out.html"), "there is no file nowhere.jsonl: write one with"),
        (("ROWS", "-o", "nowhere/out.html"), "cannot write nowhere/out.html: create its directory"),
        (("ROWS", "-o", "./rows.jsonl"), "--out would overwrite ./rows.jsonl: name another file"),
        (("ROWS", "-o", "checks.jsonl", "--checks", "checks.jsonl"), "would overwrite checks"),
        (("checks.jsonl", "-o", "out.html"), "line 1: not a row of `replay --json`"),
        (("ROWS", "-o", "out.html", "--checks", "ROWS"), "was not written by `replay verify"),
        (("ROWS", "-o", "out.html", "--checks", "deep.jsonl"), "was not written by `replay verify"),
        (("ROWS", "-o", "out.html", "--outputs", "."), "give --checks FILE too"),
        (("ROWS", "-o", "out.html", "--budget", "psnr=3"), "unknown metric 'psnr'"),
        (("ROWS", "-o", "x", "--plot", "./x"), "--out and --plot both name"),
        (("ROWS",), "give -o FILE for a report, --plot DIR for charts"),
        (("ROWS", "--plot", "NOTE"), "cannot write --plot"),
        (("ROWS", "--plot", "x", "--budget", "rmse=1"), "--budget is shown in a report: give -o"),
    ],
)
def test_wrong_usage_is_one_sentence(
    run_cli: RunCli,
    stored: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    sentence: str,
) -> None:
    monkeypatch.chdir(stored.parent)
    monkeypatch.setattr(chart_library, "require", lambda: None)
    note = stored.with_name("note.txt")
    note.write_text("a note\n")
    checks = "".join(json.dumps(each) + "\n" for each in pages.checks("kernel-1"))
    stored.with_name("checks.jsonl").write_text(checks)
    stored.with_name("deep.jsonl").write_text("[" * 100_000)
    before = stored.read_text()
    names = {"ROWS": str(stored), "NOTE": str(note)}
    assert sentence in refusal(run_cli, "report", *(names.get(each, each) for each in arguments))
    assert stored.read_text() == before


def test_checks_of_another_type_are_refused(tmp_path: Path) -> None:
    """A change of any part is refused, or leaves checks that can be drawn and explained."""
    path, data = tmp_path / "checks.jsonl", plain(pages.checks("kernel-1")[1])
    accepted = 0
    for at in parts(data):
        values: list[Any] = ["text", [[]], {"a": 1}, None, -1.0, 0, 5e-324, 1e308, 10**400]
        for value in values:
            changed = copy.deepcopy(data)
            functools.reduce(getitem, at[:-1], changed)[at[-1]] = value
            path.write_text(json.dumps(changed))
            with contextlib.suppress(RowsError):
                checks = read_checks(path)
                json.dumps([model_data(checks), list(answers(checks))], allow_nan=False)
                accepted += bool(explanation(stored_checks(path)[0]))
    assert accepted > 100


def test_stored_rows_become_charts(run_cli: RunCli, stored: Path, tmp_path: Path) -> None:
    pytest.importorskip("vl_convert")
    code, _, err = run_cli("report", str(stored), "--plot", str(tmp_path / "charts"))
    assert code == 0
    drawn = sorted(path.name for path in (tmp_path / "charts").glob("*.svg"))
    assert drawn
    assert err.startswith(f"charts in {tmp_path / 'charts'}: ")
    assert all(name in err for name in drawn)
    rows = tmp_path / "few.jsonl"
    rows.write_text(stored.read_text().splitlines(keepends=True)[0])
    code, _, err = run_cli("report", str(rows), "--plot", str(tmp_path / "none"))
    assert code == 0
    assert f"charts in {tmp_path / 'none'}: none: no correct kernel" in err


@pytest.mark.parametrize(
    "command",
    [
        ("report", "ROWS", "-o", "out.html"),
        ("report", "ROWS", "--plot", "out.html"),
        (*RANDOM, "--report"),
    ],
)
def test_chart_library_is_missed_before_anything_runs(
    run_cli: RunCli, stored: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    monkeypatch.chdir(stored.parent)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    given = [str(stored) if each == "ROWS" else each for each in command]
    given += ["out.html", *QUICK] if given[-1].startswith("--") else []
    assert "pip install 'attention-replay[report]'" in refusal(run_cli, *given)
    assert not Path("out.html").exists()


def test_public_function_returns_the_files_it_wrote(stored: Path, tmp_path: Path) -> None:
    pytest.importorskip("vl_convert")
    rows, page = ar.Rows.read(stored), tmp_path / "page.html"
    written = ar.report(rows, page, charts=tmp_path / "charts", checks=pages.checks("kernel-1"))
    assert written[0] == page
    assert {path.suffix for path in written[1:]} == {".svg", ".png", ".json"}
    assert all(path.is_file() for path in written)
    with pytest.raises(ar.Error, match="nothing to write: give out="):
        ar.report(rows)
