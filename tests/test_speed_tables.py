"""Figures that `benchmarks/tables/speed.py` derives from rows, and files that phases write."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import results
from benchmarks.per_pair import COLUMNS, compare
from benchmarks.tables import speed
from capture.variant import Variant
from tests.factories import random_call


def row(name: str, kernel: str, **changes: Any) -> dict[str, Any]:
    """A row of a call with head_dim 64, as a replay has it."""
    shape = {"batch": 1, "q_heads": 2, "kv_heads": 2, "q_len": 8, "kv_len": 8}
    return {
        "kernel": kernel,
        "environment": "this",
        "call": {
            "name": name,
            "is_causal": True,
            "shape": {**shape, "head_dim": 64, "v_head_dim": 64, **changes.pop("shape", {})},
        },
        "status": "ok",
        "machine": {"device": "a GPU", "torch": "2"},
        **changes,
    }


def timed(name: str, kernel: str, ms: float, pairs: int, **changes: Any) -> dict[str, Any]:
    """A row whose TFLOPS are 2·pairs·(64 + 64) operations over `ms`."""
    return row(name, kernel, time_ms={"p50": ms}, tflops=256 * pairs / ms / 1e9, **changes)


def lines(table: str) -> list[list[str]]:
    """Cells of a table's heading and lines."""
    return [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in table.splitlines()
        if line.startswith("| ")
    ]


def test_an_environment_s_baseline_is_not_a_kernel_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    results.write(
        [
            timed("window", "one", 0.6, 1_000_000),
            row("window", "two", status="unsupported"),
            timed("window", "torch-masked", 0.5, 1_000_000),
            timed("window", "torch-masked", 9.0, 1_000_000, environment="fa4"),
            timed("window", "fa4", 0.25, 1_000_000, environment="fa4"),
        ],
        path,
    )
    assert lines(speed.by_call(path)) == [
        ["ms", "one", "two", "torch-masked", "fa4"],
        ["window", "0.600", "", "0.500", "0.250"],
    ]


def test_what_a_pair_costs_of_drop_ins_and_cores(tmp_path: Path) -> None:
    path = tmp_path / "per_pair.csv"
    machine = {"machine.device": "a GPU", "machine.torch": "2.11", "machine.triton": "3.6"}
    timed_beside = [
        {"call": call, "beside": "8k", "kernel": kernel, "part": part, "time per pair": ratio}
        for call, kernel, part, ratio in (
            ("8k-window", "one", "drop-in", 1.204),
            ("8k-window", "two", "drop-in", 1.5),
            ("8k-window", "two", "core", 0.75),
            ("8k-cap", "two", "drop-in", 1.1),
        )
    ]
    results.write_lines([line | machine for line in timed_beside], COLUMNS, path)
    table = speed.per_pair(path)
    assert lines(table) == [
        ["time per visible pair", "one", "two"],
        ["8k-window / 8k", "1.20", "1.50 [0.75]"],
        ["8k-cap / 8k", "", "1.10"],
    ]
    assert table.endswith("a GPU, torch 2.11, triton 3.6.\n")


def test_a_pair_s_time_is_relative_to_the_plain_call_s() -> None:
    plain = random_call(q_len=8, kv_len=8, is_causal=True)
    calls = {
        "plain-again": plain,
        "plain-window": replace(plain, variant=Variant(True, (1, None))),
    }
    found = list(compare("plain", plain, calls, "eager", torch.device("cpu"), cache="warm"))
    assert [(line["call"], line["part"]) for line in found] == [
        ("plain-again", "drop-in"),
        ("plain-window", "drop-in"),
    ]
    for line in found:
        assert line["low"] <= line["time per pair"] <= line["high"]
    # In a window of two keys a query sees 15 of the 36 pairs that causality leaves.
    assert found[0]["pairs"] == found[0]["plain, pairs"]
    assert found[1]["pairs"] * 36 == found[1]["plain, pairs"] * 15
