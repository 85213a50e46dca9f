"""The history page has every kept run, and keeps devices apart."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from replay.rows.row import Status
from replay.rows.row_files import save_jsonl
from tests.in_this_process import RunCli, refusal
from tests.replay.comparison.simulated import HERE, run

MINE = "<mine>"


def keep(directory: Path, day: int, device: str, status: Status = "ok", commit: str = "") -> None:
    stamp = {"commit": commit, "measured_at": f"2026-11-{day}T08:15:00Z"}
    rows = run(f"{day}", {MINE: 0.5}, machine=replace(HERE, device=device), **stamp).rows
    rows = [replace(each, status=status) if each.kernel == MINE else each for each in rows]
    save_jsonl(rows, directory / f"{device}-{30 - day}.jsonl")


def test_page_has_runs_by_device_and_date(tmp_path: Path, run_cli: RunCli) -> None:
    pytest.importorskip("vl_convert")
    assert "holds no .jsonl file" in refusal(run_cli, "history", str(tmp_path), "--out", "-")
    keep(tmp_path, 10, "GPU 1", commit="aaaaaaa")
    keep(tmp_path, 12, "GPU 1", "inaccurate", "aaaaaaa")
    keep(tmp_path, 11, "GPU 2")
    code, page, err = run_cli("history", str(tmp_path), "--out", "-")
    assert (code, err) == (0, "")
    assert "3 runs, 2026-11-10 to 2026-11-12" in page
    assert "<script" not in page
    first, second = page.split("<h2>")[1:]
    assert re.findall("<tr><th>kernel<th>(.*)", first) == [
        "aaaaaaa · 2026-11-12 08:15:00<th>aaaaaaa · 2026-11-10 08:15:00"
    ]
    assert first.count("; output: wrong") == 2  # a cross in the speed-ups and in the times
    assert re.findall("<tr><th>kernel<th>(.*)", second) == ["GPU 2-19 · 2026-11-11"]
    assert "<td>&lt;mine&gt;<td class=wrong>✗" in first
    assert "<td>2.00× · " in first
    assert MINE not in page
