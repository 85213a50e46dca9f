"""Figures that `benchmarks/tables/speed.py` derives from rows, and files written by its phases."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import results
from benchmarks.attention_kernels import per_pair
from benchmarks.tables import speed
from capture.call.attention_variant import AttentionVariant
from replay.kernels.registry import Kernel
from tests.factories import random_call

MACHINE = {"machine.device": "a GPU", "machine.torch": "2.11", "machine.triton": "3.6"}


def row(name: str, kernel: str, **changes: Any) -> dict[str, Any]:
    """Return a row that a replay would write for a call with head_dim 64."""
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
    """Return a row whose TFLOPS follow from 2·pairs·(64 + 64) operations in `ms`."""
    return row(name, kernel, time_ms={"p50": ms}, tflops=256 * pairs / ms / 1e9, **changes)


def lines(table: str) -> list[list[str]]:
    """Return the cells in a table's heading and lines."""
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


def test_a_pair_s_time_is_relative_to_the_plain_call_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ratios are computed per round, for cores too; unsupported calls have no line."""
    plain = random_call(q_len=8, kv_len=8, is_causal=True)
    # In a window of two keys, 15 of the 36 causal pairs are visible.
    calls = {
        "plain-window": replace(plain, variant=AttentionVariant(True, (1, None))),
        "plain-cap": replace(plain, variant=AttentionVariant(softcap=5.0)),
    }
    kernel = Kernel(
        "one",
        lambda *args, **options: torch.empty(0),
        prepare=lambda call: lambda: torch.empty(0),
        features=frozenset({"window"}),
    )
    ms = {
        ("plain", "drop-in"): (3.6, 7.2, 3.6),
        ("plain-window", "drop-in"): (3.0, 3.0, 1.5),
        ("plain", "core"): (3.6, 3.6, 3.6),
        ("plain-window", "core"): (1.5, 1.5, 1.5),
    }

    def measured(candidates: Any, device: torch.device, **options: Any) -> dict[Any, Any]:
        assert candidates.keys() == ms.keys()
        return {key: SimpleNamespace(ms=ms[key], error=None) for key in candidates}

    monkeypatch.setattr(per_pair, "measure", measured)
    monkeypatch.setattr(per_pair, "select", lambda names: ([kernel], {}))
    found = list(per_pair.compare("plain", plain, calls, "one", torch.device("cpu")))
    assert [(line["call"], line["beside"], line["part"]) for line in found] == [
        ("plain-window", "plain", "drop-in"),
        ("plain-window", "plain", "core"),
    ]
    # A visible pair takes 2, 1 and 1 times as long with the window as without it.
    assert [line["time per pair"] for line in found] == pytest.approx([1.0, 1.0])
    assert (found[0]["low"], found[0]["high"]) == pytest.approx((1.0, 2.0))
    assert found[0]["pairs"] * 36 == found[0]["plain, pairs"] * 15
