"""Figures that `benchmarks/tables/speed.py` derives from rows, and the files that phases write."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import cold_cache, results
from benchmarks.attention_kernels import decode, narrow_heads, per_pair, triton_kernels
from benchmarks.tables import speed
from capture.call.attention_variant import AttentionVariant
from replay.kernels.registry import Kernel
from tests.factories import random_call

MACHINE = {"machine.device": "a GPU", "machine.torch": "2.11", "machine.triton": "3.6"}


def row(name: str, kernel: str, **changes: Any) -> dict[str, Any]:
    """Return a replay's row of a call with head_dim 64."""
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
    """Return a row whose TFLOPS are 2·pairs·(64 + 64) operations divided by `ms`."""
    return row(name, kernel, time_ms={"p50": ms}, tflops=256 * pairs / ms / 1e9, **changes)


def lines(table: str) -> list[list[str]]:
    """Return the cells of a table's heading and lines."""
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
    timed_beside = [
        {"call": call, "beside": "8k", "kernel": kernel, "part": part, "time per pair": ratio}
        for call, kernel, part, ratio in (
            ("8k-window", "one", "drop-in", 1.204),
            ("8k-window", "two", "drop-in", 1.5),
            ("8k-window", "two", "core", 0.75),
            ("8k-cap", "two", "drop-in", 1.1),
        )
    ]
    results.write_lines([line | MACHINE for line in timed_beside], per_pair.COLUMNS, path)
    table = speed.per_pair(path)
    assert lines(table) == [
        ["time per visible pair", "one", "two"],
        ["8k-window / 8k", "1.20", "1.50 [0.75]"],
        ["8k-cap / 8k", "", "1.10"],
    ]
    assert table.endswith("a GPU, torch 2.11, triton 3.6.\n")


def test_decode_by_what_is_read_and_how_it_is_planned(tmp_path: Path) -> None:
    path = tmp_path / "decode.csv"
    timed = [
        {"case": case, "cache": cache, "tiling": tiling, "ms": ms, "floor / time": 0.1 / ms}
        | MACHINE
        for case, cache, tiling, ms in (
            ("even", "torch-cudnn", "", 0.125),
            ("even", "fp8", "plan 128 keys", 0.25),
            ("even", "fp8", "64 keys", 0.2),
            ("even", "16 bits", "plan 64 keys", 0.1),
            ("mixed", "16 bits", "plan 64 keys", 0.4),
        )
    ]
    results.write_lines(timed, decode.COLUMNS, path)
    assert lines(speed.decode(path)) == [
        ["ms", "16 bits", "fp8", "torch-cudnn"],
        ["even", "0.100 (100 %)", "0.250 (40 %)", "0.125 (80 %)"],
        ["mixed", "0.400 (25 %)", "", ""],
    ]


def test_times_behind_what_fills_the_cache(tmp_path: Path) -> None:
    path = tmp_path / "cold_cache.csv"
    shares = {"written / layer": 1.25, "read / layer": 0.984}
    line = {"call": "a call", "kernel": "mine", "layer, µs": 20.04} | shares | MACHINE
    results.write_lines([line], cold_cache.COLUMNS, path)
    assert lines(speed.cold_cache(path)) == [
        ["call", "behind a layer, µs", "behind writes", "behind reads"],
        ["a call: mine", "20.0", "1.25", "0.98"],
    ]


def test_times_of_narrow_heads_and_the_schedule_that_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "narrow_heads.csv"
    line = {
        **{"call": "a model", "batch": 2, "q_heads": 8, "kv_heads": 4, "q_len": 77, "kv_len": 77},
        **{"is_causal": True, "torch-cudnn, ms": 0.03, "triton-fa3, ms": 0.02, "consumers": 3},
        **{f"{count} consumers, ms": 0.01 * count for count in narrow_heads.CONSUMERS},
        **MACHINE,
    }
    results.write_lines([line], narrow_heads.COLUMNS, path)
    assert lines(speed.narrow_heads(path)) == [
        ["ms", "torch-cudnn", "triton-fa3", "faster", "4 consumers", "3 consumers", "2 consumers"],
        ["a model: 2×8/4×77 causal", "0.030", "0.020", "1.50", "0.040", "**0.030**", "0.020"],
    ]


def test_what_is_predicted_of_narrow_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every schedule has a predicted time, and the fastest is chosen."""
    persistent = pytest.importorskip("attention_kernels.hopper.persistent")
    monkeypatch.setattr(persistent, "multiprocessors", lambda device: 132)
    for spec in narrow_heads.CALLS.values():
        line = narrow_heads.predicted(spec, torch.device("cuda"))
        times = {each: line[f"{each} consumers, predicted"] for each in narrow_heads.CONSUMERS}
        assert line["consumers"] == min(times, key=times.__getitem__)
        assert all(0.005 < time < 20 for time in times.values())


def test_a_pair_s_time_is_relative_to_the_plain_call_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ratios are taken in each round, also for a core; unsupported calls have no line."""
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
    # A pair of the window takes 2, 1 and 1 times as long as one of the plain call.
    assert [line["time per pair"] for line in found] == pytest.approx([1.0, 1.0])
    assert (found[0]["low"], found[0]["high"]) == pytest.approx((1.0, 2.0))
    assert found[0]["pairs"] * 36 == found[0]["plain, pairs"] * 15


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
