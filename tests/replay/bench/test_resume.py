"""An interrupted file of rows is continued exactly; other files are refused and stay unchanged."""

import contextlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capture.call.shape import Shape
from replay.bench.resume import finished_rows, latest
from replay.bench.settings import Settings
from replay.kernels.registry import Kernel
from replay.rows.errors_of_output import Errors, Summary
from replay.rows.fields import SCHEMA
from replay.rows.row import Energy, Machine, Mask, Row, Speedup
from replay.rows.row_files import RowsError, row_from_json, row_to_json, write_jsonl
from replay.timing.statistics import summarize
from replay.workloads.random_calls import Spec, random_weights
from replay.workloads.recorded import from_directory
from replay.workloads.workload import random_workloads
from tests import factories
from tests.factories import kernel, random_call, store_part

FINITE = st.floats(min_value=0, exclude_min=True, allow_infinity=False)
SIMPLE: dict[Any, st.SearchStrategy[Any]] = {
    str: st.text(max_size=20),
    int: st.integers(0, 2**53),
    bool: st.booleans(),
    float: FINITE,
    type(None): st.none(),
    tuple[tuple[float, ...], ...]: st.just(((0.5, 0.25), (1.0, 2.0))),  # equal lengths
}


def values_of(kind: Any, figures: st.SearchStrategy[float]) -> st.SearchStrategy[Any]:
    """Return a strategy for values of a type; errors and summaries are drawn from `figures`."""
    if kind in SIMPLE:
        return SIMPLE[kind]
    if get_origin(kind) is Literal:
        return st.sampled_from(get_args(kind))
    parts = [values_of(part, figures) for part in get_args(kind) if part is not ...]
    if get_origin(kind) in (Union, UnionType):
        return st.one_of(parts)
    if get_origin(kind) is tuple:
        if get_args(kind)[-1] is not ...:
            return st.tuples(*parts)
        at_least = int(get_args(kind)[0] is float)  # times have at least one sample
        return st.lists(parts[0], min_size=at_least, max_size=3).map(tuple)
    drawn = {Errors: figures.map(abs), Summary: figures}.get(kind, FINITE)
    fields = {
        name: drawn if each is float else values_of(each, figures)
        for name, each in get_type_hints(kind).items()
    }
    if issubclass(kind, Speedup):
        ends = st.just((None, None)) | st.tuples(FINITE, FINITE)
        made = st.builds(kind, **{**fields, "low": st.none(), "high": st.none()})
        return st.builds(lambda one, pair: replace(one, low=pair[0], high=pair[1]), made, ends)
    return st.builds(kind, **fields)


def through_a_file(row: Row) -> Row:
    return row_from_json(json.loads(json.dumps(row_to_json(row), allow_nan=False)))


@given(values_of(Row, FINITE))
@settings(max_examples=40, deadline=None)
def test_row_is_read_back_unchanged(row: Row) -> None:
    assert through_a_file(row) == row


@given(values_of(Row, st.floats()))
@settings(max_examples=40, deadline=None)
def test_row_with_nan_and_infinities_is_rewritten_unchanged(row: Row) -> None:
    assert row_to_json(through_a_file(row)) == row_to_json(row)


CALLS = random_workloads("random", [Spec(1, 2, 2, length, length, 8, 8) for length in (4, 5, 6)], 0)
ASSIGNED = {"this": [kernel("a"), kernel("b")]}
SETTINGS = factories.settings()
TIMED: dict[str, Any] = {"cache": "warm", "calls_before": 0, "timer": "perf_counter"}
"""Fields of rows that were timed with `SETTINGS` on a CPU."""
HERE = Machine("H200", torch="2.11.0")


def row(call: int, name: str, environment: str = "this", **fields: Any) -> Row:
    shape = Shape(1, 2, 2, 4 + call, 4 + call, 8, 8)
    usual = {"model": "random", "weights": random_weights("normal"), "module": "", "phase": ""}
    facts = {**usual, "shape": shape, **fields}
    call_facts = factories.call_facts(f"random-{call:02d}", **facts)
    return factories.row(name, call_facts, environment=environment)


@pytest.fixture
def written(tmp_path: Path) -> Callable[..., Path]:
    """`written(rows, end)` writes a file with these rows, followed by `end`."""

    def write(rows: list[Row], end: str = "") -> Path:
        path = tmp_path / "rows.jsonl"
        with path.open("w") as file:
            write_jsonl(rows, file)
            file.write(end)
        return path

    return write


def finished(
    path: Path, kernels: dict[str, list[Kernel]] = ASSIGNED, asked: Settings = SETTINGS
) -> tuple[list[Row], list[int]]:
    """Return the rows to keep, and the numbers of the calls that are left."""
    kept, left = finished_rows(path, CALLS, kernels, [HERE], asked)
    return kept, [int(each.name[-2:]) for each in left]


BOTH = [row(call, name) for call in (0, 1) for name in ("a", "b")]
WITH_BASELINE = [*BOTH, row(1, "baseline")]
COMPARED = [replace(each, speedup=factories.speedup_over("baseline")) for each in WITH_BASELINE]


@pytest.mark.parametrize(
    ("rows", "kernels", "kept", "left"),
    [
        ([*BOTH[:2], row(0, "baseline"), BOTH[2]], ASSIGNED, slice(3), [1, 2]),
        # A kernel in two environments is finished only when it has a row of both.
        (
            [*BOTH[:2], row(0, "b", "fa4"), *BOTH[2:]],
            {**ASSIGNED, "fa4": [kernel("b")]},
            slice(3),
            [1, 2],
        ),
        ([factories.unreadable("random-00"), *BOTH[2:]], ASSIGNED, slice(1, 3), [0, 2]),
        (COMPARED, ASSIGNED, slice(2, 5), [0, 2]),
    ],
    ids=["a kernel lacks", "an environment lacks", "unreadable", "the baseline lacks"],
)
def test_call_is_finished_when_every_kernel_has_a_row(
    written: Callable[..., Path],
    rows: list[Row],
    kernels: dict[str, list[Kernel]],
    kept: slice,
    left: list[int],
) -> None:
    assert finished(written(rows), kernels) == (rows[kept], left)


@pytest.mark.parametrize("end", ["{", '{"schema": 2, "kern', '{"schema": 2, "kernel": "größe'])
def test_cut_off_line_costs_the_last_call(written: Callable[..., Path], end: str) -> None:
    """The incomplete line may belong to the previous call, so that call is replayed too."""
    assert finished(written(BOTH, end)) == (BOTH[:2], [1, 2])
    assert finished(written([], end)) == ([], [0, 1, 2])


def test_missing_file_has_no_rows(tmp_path: Path) -> None:
    assert finished(tmp_path / "rows.jsonl") == ([], [0, 1, 2])
    (tmp_path / "rows.jsonl").touch()
    assert finished(tmp_path / "rows.jsonl") == ([], [0, 1, 2])


@pytest.mark.parametrize(
    ("rows", "end", "sentence"),
    [
        ([], '{"name": "someone", "version": 1}', r"line 1: not a row of `replay --json`"),
        ([], "[1, 2]\n", "line 1: not a row"),
        ([], "a note\n", "line 1: not a row"),
        ([row(0, "a")], "{}\n", "line 2: not a row"),
        ([], f'{{"schema": {SCHEMA}, "colour": "red"}}\n', "line 1: not a row"),
        ([row(0, "a")], "\n", "line 2: not a row"),
        ([row(7, "a")], "", "has rows of another random-07: resume what it was written for"),
        ([row(0, "a", shape=Shape(1, 2, 2, 9, 9, 8, 8))], "", "rows of another random-00"),
        ([row(0, "a", dtype="float16")], "", "rows of another random-00"),
        ([row(0, "a", weights=random_weights("sink"))], "", "rows of another random-00"),
        ([row(0, "a", mask=Mask("bool", (1, 1, 1, 4)))], "", "rows of another random-00"),
    ],
)
def test_rows_of_another_call_are_refused(
    written: Callable[..., Path], rows: list[Row], end: str, sentence: str
) -> None:
    with pytest.raises(RowsError, match=sentence):
        finished(written(rows, end))


@pytest.mark.parametrize(("schema", "version"), [(None, 1), (1, 1), (99, 99)])
def test_rows_of_another_version_are_refused(
    written: Callable[..., Path], schema: int | None, version: int
) -> None:
    path = written([row(0, "a")], "")
    data = json.loads(path.read_text())
    del data["schema"]
    path.write_text(json.dumps(data if schema is None else data | {"schema": schema}) + "\n")
    sentence = f"holds rows in format {version}, but this version reads format {SCHEMA}"
    with pytest.raises(RowsError, match=sentence):
        finished(path)


def test_rows_of_joined_calls_are_continued(written: Callable[..., Path], tmp_path: Path) -> None:
    """Only rows of the same parts are continued, not rows of another step."""
    for rank in (0, 1):
        store_part(tmp_path / "calls", random_call(q_heads=4), rank, [0, 1], step=2)
    calls, _ = from_directory(tmp_path / "calls", join_ranks=True)
    facts = factories.call_facts(calls[0].name, module="", step=2, call_index=0)
    measured = factories.row("a", facts, machine=HERE)
    kernels = {"this": [kernel("a")]}
    kept, left = finished_rows(written([measured]), calls, kernels, [HERE], SETTINGS)
    assert (kept, left) == ([measured], [])
    other = replace(measured, call=replace(facts, step=3))
    with pytest.raises(RowsError, match=r"rows of another model\.ranks0-1-000000"):
        finished_rows(written([other]), calls, kernels, [HERE], SETTINGS)


def test_call_that_was_replayed_again_keeps_its_later_rows() -> None:
    first, again = row(0, "a"), row(0, "a")
    beside, of_another = row(0, "b"), row(1, "b")
    elsewhere = row(0, "a", "fa4")
    unread = replace(row(0, ""), status="crash")
    kept = latest([first, beside, elsewhere, of_another, again])
    assert list(map(id, kept)) == list(map(id, [elsewhere, of_another, again]))
    assert list(map(id, latest([unread, beside]))) == [id(beside)]
    assert list(map(id, latest([beside, unread]))) == [id(unread)]


def test_gpu_rows_are_continued_on_other_cores(written: Callable[..., Path]) -> None:
    here, there = (replace(HERE, cuda="13.0", usable_cpus=cpus) for cpus in ("16", "32"))
    path = written([replace(row(0, "a"), machine=there)])
    kept, left = finished_rows(path, CALLS, {"this": [kernel("a")]}, [here], SETTINGS)
    assert [each.machine for each in kept] == [there]
    assert left == CALLS[1:]


ENERGY = Energy(150.0, 0.8, 690.0, 1.05)
ENERGY_WANTED = replace(SETTINGS, energy=True)


@pytest.mark.parametrize(
    ("changed", "asked", "sentence"),
    [
        ({"machine": HERE}, SETTINGS, None),
        ({"machine": Machine()}, SETTINGS, None),  # its worker died before reporting the machine
        (
            {"machine": replace(HERE, torch="2.13.0")},
            SETTINGS,
            r"torch 2.13.0 \(now 2.11.0\): resume it as it was begun",
        ),
        ({"machine": replace(HERE, torch="2.13.0"), "environment": "fa4"}, SETTINGS, None),
        ({"machine": replace(HERE, usable_cpus="3")}, SETTINGS, "with usable_cpus 3"),
        (
            {"machine": replace(HERE, device="H100"), "environment": "fa4"},
            SETTINGS,
            r"with device H100 \(now H200\)",
        ),
        ({"cache": "cold"}, SETTINGS, r"with --cache cold \(now warm\)"),
        ({"calls_before": 4}, SETTINGS, r"with --calls-before 4 \(now 0\)"),
        ({"timer": "cuda-events"}, SETTINGS, r"with timer cuda-events \(now perf_counter\)"),
        ({"time_ms": None, "cache": ""}, SETTINGS, None),
        ({"energy": ENERGY}, ENERGY_WANTED, None),
        ({"flags": ("no energy: the counter stands still",)}, ENERGY_WANTED, None),
        ({"time_ms": None}, ENERGY_WANTED, None),
        ({}, ENERGY_WANTED, r"with --metric energy off \(now on\)"),
        ({}, replace(SETTINGS, backward=True), r"with --backward off \(now on\)"),
        ({"energy": ENERGY}, SETTINGS, r"with --metric energy on \(now off\)"),
        ({"flags": ("no energy: it changes its inputs",)}, SETTINGS, r"energy on \(now off\)"),
    ],
)
def test_rows_measured_otherwise_are_refused(
    written: Callable[..., Path], changed: dict[str, Any], asked: Settings, sentence: str | None
) -> None:
    timed = replace(row(0, "a"), time_ms=summarize([1.0]), **TIMED)
    path = written([replace(timed, **changed)])
    refused = pytest.raises(RowsError, match=sentence)
    with contextlib.nullcontext() if sentence is None else refused:
        finished(path, asked=asked)
