"""One list of fields says what a row is, in JSON, in CSV and in words."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from capture.call import AttentionCall
from replay.accuracy.errors import compare
from replay.bench.runner import replay
from replay.bench.settings import Settings
from replay.kernels.registry import Kernel
from replay.rows.fields import FIELDS, leaf
from replay.rows.files import row_to_json, write_csv, write_jsonl
from replay.rows.row import (
    Accuracy,
    CallFacts,
    Comparison,
    GpuState,
    Program,
    Row,
    Speedup,
    Summary,
)
from replay.timing.machine import describe
from replay.timing.statistics import summarize
from replay.workloads.recorded import Workload

SAMPLES = {"time_ms.samples", "core_time_ms.samples", "layer_host_ms.samples"}


@pytest.fixture
def row() -> Row:
    """Every field has a value."""
    errors = compare(torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3, 4))
    times = summarize([1.0, 2.0, 4.0])
    state = GpuState(1980, 690.5, 61, ("software power cap", "0x400"))
    return Row(
        "mine",
        CallFacts(
            "call", "model", "random", "layers.0", "denoise", 2, 7, dtype="float16", mask="bool"
        ),
        "ok",
        "max abs error …",
        flags=["no core time"],
        changed_inputs=["key"],
        log="its last words",
        time_ms=times,
        core_time_ms=times,
        first_call_ms=100.0,
        host_ms=0.02,
        layer_host_ms=summarize([0.6, 0.7, 0.8]),
        cache="cold",
        calls_before=4,
        tflops=500.0,
        gb_per_s=1000.0,
        flop_per_byte=70.0,
        comparison=Comparison("torch-default", Speedup(1.5, 1.4, 1.6, "faster")),
        kept=0.02,
        accuracy=Accuracy(errors, errors, errors, errors, errors),
        output_summary=Summary(-1.0, 1.0, 0.0, 0.5),
        reference_summary=Summary(-1.0, 1.0, 0.0, 0.5),
        peak_bytes=12,
        programs=[Program("kernel", 32, 0, 1024, 4)],
        gpu_before=state,
        gpu_during=state,
        machine=dict.fromkeys(
            ("device", "python", "torch", "cuda", "cudnn", "triton", "threads"), "x"
        ),
    )


def leaves(tree: dict[str, Any], path: str = "") -> Iterator[str]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{path}{name}.")
        else:
            yield f"{path}{name}"


def test_fields_are_the_leaves_of_a_row(row: Row) -> None:
    found = set(leaves(row_to_json(row)))
    paths = [item.path for item in FIELDS]
    assert len(set(paths)) == len(paths)
    assert found - set(paths) == SAMPLES
    assert set(paths) - found == set()
    assert all(item.meaning for item in FIELDS)


def test_a_replays_rows_have_no_other_leaves(
    make_call: Callable[..., AttentionCall],
    workload: Callable[..., Workload],
    kernels: Callable[..., Kernel],
    quick: Settings,
) -> None:
    broken = kernels("broken", lambda **a: torch.zeros_like(a["query"]))
    settings = replace(quick, compare_stats=True, reference="broken")
    call = make_call(with_output=True)
    known = {item.path for item in FIELDS} | SAMPLES
    empty = {"comparison", "speedup", "core_time_ms", "layer_host_ms", "gpu_before", "gpu_during"}
    empty.add("accuracy.chosen")
    for produced in replay([workload(call)], [broken], settings):
        assert set(leaves(row_to_json(produced))) <= known | empty
    assert {f"machine.{name}" for name in describe(torch.device("cpu"))} <= known


def test_json_and_csv_say_the_same(row: Row) -> None:
    lines, table = io.StringIO(), io.StringIO()
    write_jsonl([row, row], lines)
    write_csv([row, row], table)
    first, second = (json.loads(line) for line in lines.getvalue().splitlines())
    assert first == second
    header, *cells = csv.reader(io.StringIO(table.getvalue()))
    assert header == [item.path for item in FIELDS]
    assert len(cells) == 2
    written = dict(zip(header, cells[0], strict=True))
    assert written["kernel"] == "mine"
    assert float(written["time_ms.p50"]) == leaf(first, "time_ms.p50") == 2.0
    assert written["accuracy.gold.worst_head"].split() == [
        str(place) for place in leaf(first, "accuracy.gold.worst_head")
    ]
    assert all(written.values())


def test_what_is_missing_is_empty(row: Row) -> None:
    bare = Row("mine", CallFacts("call"), "unsupported", "head_dim 72")
    table = io.StringIO()
    write_csv([bare], table)
    written = next(csv.DictReader(io.StringIO(table.getvalue())))
    assert (written["status"], written["reason"]) == ("unsupported", "head_dim 72")
    assert (written["time_ms.p50"], written["speedup.ratio"], written["peak_bytes"]) == ("", "", "")
    assert leaf(row_to_json(bare), "time_ms.p50") is None
    assert leaf(row_to_json(bare), "no.such.path") is None


def test_nan_and_infinity_are_null(row: Row) -> None:
    errors = compare(torch.full((1, 1, 2, 2), math.nan), torch.ones(1, 1, 2, 2))
    row.accuracy = Accuracy(errors)
    file = io.StringIO()
    write_jsonl([row], file)
    assert "NaN" not in file.getvalue()
    read = json.loads(file.getvalue())
    assert leaf(read, "accuracy.gold.cosine") is None
    assert leaf(read, "accuracy.gold.nan_count") == 4


def test_numbers_are_not_rounded(row: Row) -> None:
    row.tflops = 1 / 3
    table = io.StringIO()
    write_csv([row], table)
    assert float(next(csv.DictReader(io.StringIO(table.getvalue())))["tflops"]) == 1 / 3


def test_a_line_is_written_as_soon_as_its_row_is_there(row: Row) -> None:
    file = io.StringIO()

    def rows() -> Iterator[Row]:
        yield row
        assert file.getvalue().count("\n") == 1
        yield row

    write_jsonl(rows(), file)
    assert file.getvalue().count("\n") == 2
