"""On a GPU, a kernel's illegal memory access affects only its own process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import replay.cli.main as cli

OUT_OF_BOUNDS = f"{Path(__file__).parent / 'out_of_bounds.py'}:attention"


def test_illegal_memory_access_costs_one_row_a_call(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    kernels = f"torch-flash,{OUT_OF_BOUNDS},torch-cudnn,torch-math"
    shape = ["random", "-b", "1", "-hq", "8", "-sq", "512", "-d", "64", "--rounds", "5"]
    with pytest.raises(SystemExit) as exit_:
        cli.main([*shape, "--kernels", kernels, "--json", str(file)])
    assert exit_.value.code == 0
    rows = {row["kernel"]: row for row in map(json.loads, file.read_text().splitlines())}
    assert rows[OUT_OF_BOUNDS]["status"] == "crash"
    assert "illegal memory access" in rows[OUT_OF_BOUNDS]["reason"]
    good = ("torch-flash", "torch-cudnn", "torch-math", "torch-default")
    assert {rows[name]["status"] for name in good} == {"ok"}
    assert all(rows[name]["time_ms"]["n"] == 5 for name in good)


def test_resources_of_a_triton_kernel_are_noted(tmp_path: Path) -> None:
    pytest.importorskip("sageattention")
    file = tmp_path / "rows.jsonl"
    shape = ["random", "-b", "1", "-hq", "8", "-sq", "512", "-d", "64", "--rounds", "5"]
    with pytest.raises(SystemExit):
        cli.main([*shape, "--kernels", "sage1", "--metric", "time,resources", "--json", str(file)])
    rows = {row["kernel"]: row for row in map(json.loads, file.read_text().splitlines())}
    assert rows["sage1"]["status"] == "ok"
    assert rows["sage1"]["changed_inputs"] == ["key"]
    programs = rows["sage1"]["programs"]
    assert programs
    assert all(program["registers"] > 0 and program["warps"] > 0 for program in programs)
