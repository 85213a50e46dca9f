"""One list of fields defines a row in JSON, in CSV and in words."""

import csv
import io
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from capture.text.printable import printable
from replay.kernels.registry import Kernel
from replay.rows.fields import FIELDS
from replay.rows.row import Roof, Row
from replay.rows.row_files import row_to_json, write_csv, write_jsonl
from tests import factories

TIMES = ("time_ms", "block_ms", "core_time_ms", "backward_ms", "both_ms", "layer_host_ms")
SAMPLES = {
    f"{times}.{part}"
    for times in TIMES
    for part in ("samples", "interrupted", "unconfirmed", "control", "process_factor")
}
IN_JSON_ALONE = SAMPLES | {"accuracy.where.relative_l1"}
IN_JSON_ALONE |= {f"gradients.{name}.where" for name in ("query", "key", "value")}


@pytest.fixture
def row() -> Row:
    return factories.full_row()


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
    assert found - set(paths) == IN_JSON_ALONE
    assert set(paths) - found == set()
    assert all(item.meaning for item in FIELDS)


def test_replays_rows_have_no_other_leaves(
    replayed: Callable[..., dict[str, Row]],
    kernels: Callable[..., Kernel],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("replay.bench.runner.measure_roof", lambda *_: Roof(1e3, 1e6))
    broken = kernels("broken", lambda **a: torch.zeros_like(a["query"]))
    asked = {"compare_stats": True, "errors_against": "broken", "roofline": True}
    known = {item.path for item in FIELDS} | IN_JSON_ALONE
    empty = {"speedup", *TIMES, "gpu_before", "gpu_during"}
    empty |= {"call.mask", "call.batch", "energy", "accuracy.chosen"}
    empty |= {"backward_speedup", "both_speedup", "gradients"}
    rows = replayed(factories.random_call(with_output=True), broken, **asked)
    for produced in rows.values():
        assert set(leaves(row_to_json(produced))) <= known | empty
        assert produced.roof is not None
        assert (produced.roof_share is None) == (produced.tflops is None)


def test_table_sends_no_control_characters() -> None:
    table = io.StringIO()
    write_csv(
        [factories.row("mine", factories.call_facts(module="a\x1b[2J"), log="b\nc\x07")], table
    )
    written = next(csv.DictReader(io.StringIO(table.getvalue(), newline="")))
    assert (written["call.module"], written["log"]) == ("a [2J", "b\nc ")


@pytest.mark.parametrize("text", ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1"])
def test_spreadsheet_evaluates_no_text(text: str) -> None:
    table, json_file = io.StringIO(), io.StringIO()
    bare = factories.row("mine", factories.call_facts(model=text), flags=(text, "other"))
    write_csv([bare], table)
    write_jsonl([bare], json_file)
    written = next(csv.DictReader(io.StringIO(table.getvalue(), newline="")))
    assert written["call.model"] == f"'{printable(text)}"
    assert written["flags"] == f"'{printable(text)} other"
    assert json.loads(json_file.getvalue())["call"]["model"] == text


def test_line_is_written_at_once(row: Row) -> None:
    file = io.StringIO()

    def rows() -> Iterator[Row]:
        yield row
        assert file.getvalue().count("\n") == 1
        yield row

    write_jsonl(rows(), file)
    assert file.getvalue().count("\n") == 2
