"""Figures that `benchmarks/tables/speed.py` derives from rows, and files that phases write."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import results, triton_kernels
from benchmarks.tables import speed
from benchmarks.variants import PLAIN, SWEEPS
from capture.variant import Variant
from replay.timing.flops import tflops, valid_pairs
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


def test_the_time_of_a_pair_is_set_beside_the_plain_call_s(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    results.write(
        [
            # 2 ms for 4,000,000 pairs: 0.5 ns a pair. With a window 0.6 ms for 1,000,000: 0.6 ns.
            timed("plain", "one", 2.0, 4_000_000),
            timed("window", "one", 0.6, 1_000_000),
            # 1 ns, and 1.5 ns; of the core 0.8 ns, and 0.6 ns.
            timed("plain", "two", 4.0, 4_000_000, core_time_ms={"p50": 3.2}),
            timed("window", "two", 1.5, 1_000_000, core_time_ms={"p50": 0.6}),
            # No figure without both calls.
            timed("window", "no plain call", 1.0, 1_000_000),
            timed("plain", "no window", 1.0, 4_000_000),
            row("window", "no window", status="unsupported"),
            # An environment's baseline is not the one that is meant; its kernels are.
            timed("plain", "torch-masked", 1.0, 4_000_000),
            timed("window", "torch-masked", 0.5, 1_000_000),
            timed("window", "torch-masked", 9.0, 1_000_000, environment="fa4"),
            timed("plain", "fa4", 1.0, 4_000_000, environment="fa4"),
            timed("window", "fa4", 0.25, 1_000_000, environment="fa4"),
        ],
        path,
    )
    assert lines(speed.per_pair(path, {"window": "plain", "not measured": "plain"})) == [
        ["time per visible pair", "one", "two", "torch-masked", "fa4"],
        ["window / plain", "1.20", "1.50 [0.75]", "2.00", "1.00"],
    ]
    by_call = {line[0]: line for line in lines(speed.by_call(path))}
    assert by_call["window"] == ["window", "0.600", "1.500", "1.000", "", "0.500", "0.250"]


@pytest.mark.parametrize(
    ("sizes", "pairs"),
    [
        # Two heads; rows of 1, 2, 3, 4 keys, or of 1, 2, 2, 2 in a window of one key before.
        ({"q_len": 4, "kv_len": 4, "is_causal": True}, 2 * 10),
        ({"q_len": 4, "kv_len": 4, "is_causal": True, "variant": Variant(window=(1, None))}, 2 * 7),
        # Bottom right, the last of two queries sees all of five keys, the first one fewer.
        ({"q_len": 2, "kv_len": 5, "is_causal": True, "variant": Variant(True)}, 2 * 9),
    ],
)
def test_the_pairs_of_a_row_are_those_of_its_call(sizes: dict[str, Any], pairs: int) -> None:
    call = random_call(head_dim=24, v_head_dim=16, **sizes)
    assert valid_pairs(call) == pairs
    cells = {
        "call.shape.head_dim": "24",
        "call.shape.v_head_dim": "16",
        "time_ms.p50": results.cell(0.3),
        "tflops": results.cell(tflops(call, 0.3)),
    }
    assert speed.visible_pairs(cells) == pytest.approx(pairs, rel=1e-5)


def test_plain_calls_have_the_shape_of_those_beside_them() -> None:
    calls = {name: found for each in SWEEPS.values() for name, found in each.items()}
    for name, plain in PLAIN.items():
        assert calls[name][0] == calls[plain][0]
        assert plain == "packed" or not calls[plain][1]
        kernels = [kernels for kernels, each in SWEEPS.items() if {name, plain} <= each.keys()]
        assert len(kernels) == 1, f"{name} and {plain} are timed on different kernels"
    many_queries = {name for name, (spec, _) in calls.items() if spec.q_len > 1}
    assert many_queries == PLAIN.keys() | set(PLAIN.values())


def test_a_value_head_dim_of_its_own_is_in_the_shape(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    mla = {"head_dim": 192, "v_head_dim": 128}
    results.write([timed("call", "one", 1.0, 10**9), timed("mla", "one", 1.0, 1, shape=mla)], path)
    shapes = [line[0] for line in lines(speed.by_shape(str(path)))[1:]]
    assert shapes == ["1×2×8×64 causal", "1×2×8×192/128 causal"]


@pytest.mark.parametrize(
    ("given", "file", "phases"),
    [
        ([], "triton_kernels.csv", ["decode-cold", "prefill"]),
        (["--phase", "prefill"], "triton_prefill.csv", ["prefill"]),
        (["--phase", "head-dims"], "triton_head_dims.csv", ["head-dims"]),
        (["--phase", "decode", "--out", "mine.csv"], "mine.csv", ["decode-cold"]),
    ],
)
def test_a_phase_alone_writes_no_other_phase_s_file(
    given: list[str], file: str, phases: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[tuple[str, str]] = []

    def sweep(calls: Any, names: str, arguments: argparse.Namespace, rows: Any) -> None:
        ran.append((calls[0][0].name.rpartition("-")[0], arguments.out.name))

    monkeypatch.setattr(triton_kernels, "sweep", sweep)
    monkeypatch.setattr(sys, "argv", ["triton_kernels", *given])
    triton_kernels.main()
    assert ran == [(phase, file) for phase in phases]
