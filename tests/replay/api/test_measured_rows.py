"""A replay's rows are a list that has `best`, writes files and shows a table."""

from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from replay.api.measured_rows import HEADINGS, Rows
from replay.rows.row import Machine, Row
from replay.rows.row_files import RowsError
from tests.factories import call_facts, row, speedup_over, unreadable

HOSTILE = "<img src=x onerror=alert(1)>&amp;\x1b[31m"


class Cells(HTMLParser):
    """Parser that collects the text of every table cell, row by row, and every tag."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.lines: list[list[str]] = []
        self.tags: set[str] = set()
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.add(tag)
        if tag == "tr":
            self.lines.append([])
        elif tag in ("th", "td"):
            self.lines[-1].append("")

    def handle_data(self, data: str) -> None:
        if self.lines and self.lines[-1]:
            self.lines[-1][-1] += data


def test_rows_are_a_table() -> None:
    rows = Rows([row("mine", ms=1.25, speedup=speedup_over(), tflops=123.4)])
    heading, line = Cells(rows._repr_html_()).lines
    shown = dict(zip(heading, line, strict=True))
    assert tuple(heading) == HEADINGS
    assert (shown["kernel"], shown["time ms"], shown["TFLOPS"]) == ("mine", "1.25", "123.4")
    assert shown["speed-up"].startswith("1.50×")
    assert shown["status"] == "ok"
    assert [line.split() for line in str(rows).splitlines()[1:]] == [
        ["kernel", "call", "time", "ms", "speed-up", "status"],
        ["mine", "call", "1.25", *shown["speed-up"].split(), "ok"],
    ]


def test_names_stay_text() -> None:
    facts = call_facts(HOSTILE, "", model=HOSTILE)
    cells = Cells(Rows([row(HOSTILE, facts, status="error", reason=HOSTILE)])._repr_html_())
    assert cells.tags == {"p", "table", "thead", "tbody", "tr", "th", "td"}
    assert cells.lines[1].count(HOSTILE.replace("\x1b", " ")) == 4


def test_rows_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    Rows([row(ms=1.0), row("other")]).write(path)
    rows = Rows.read(str(path))
    assert isinstance(rows, Rows)
    assert list(rows) == [row(ms=1.0), row("other")]
    path.write_text(path.read_text()[:-20])
    with pytest.warns(UserWarning, match="ends within a row"):
        assert len(Rows.read(path)) == 1


def group_of(times: dict[str, list[float]], call: str = "call", **fields: Any) -> list[Row]:
    """Return rows of kernels on a call, with times by round and a speed-up over torch-default."""
    facts = call_facts(call)
    return [
        row(name, facts, samples, speedup=None if name == BASELINE else speedup_over(), **fields)
        for name, samples in times.items()
    ]


BASELINE = "torch-default"
STEADY = [1.0, 1.01, 0.99, 1.0, 1.02, 0.98, 1.0, 1.01]
FASTER = [each / 1.5 for each in STEADY]
SLOWER = [each * 1.5 for each in STEADY]


@pytest.mark.parametrize(
    ("times", "best"),
    [
        ({BASELINE: STEADY, "a": FASTER, "b": SLOWER}, "a"),
        ({BASELINE: STEADY, "b": SLOWER}, BASELINE),
        ({BASELINE: STEADY, "tied": [*STEADY[1:], STEADY[0]]}, BASELINE),
        ({BASELINE: STEADY}, BASELINE),
    ],
)
def test_best_is_the_baseline_or_a_faster_kernel(times: dict[str, list[float]], best: str) -> None:
    rows = Rows([*group_of(times, "first"), *group_of(times, "second")])
    assert [(each.call.name, each.kernel) for each in rows.best()] == [
        ("first", best),
        ("second", best),
    ]
    assert isinstance(rows.best(), Rows)


def test_best_leaves_out_kernels_that_are_wrong_or_of_another_class() -> None:
    rows = Rows(group_of({BASELINE: STEADY}, accuracy_class="exact"))
    rows += group_of({"wrong": FASTER}, status="inaccurate", accuracy_class="exact")
    rows += group_of({"spoils": FASTER}, changed_inputs=("attn_mask",), accuracy_class="exact")
    rows += group_of({"doubtful": FASTER}, flags=("unconfirmed: …",), accuracy_class="exact")
    rows += group_of({"sage": FASTER}, accuracy_class="quantised")
    assert [each.kernel for each in rows.best()] == [BASELINE]
    assert [each.kernel for each in rows.best("quantised")] == ["sage"]
    with pytest.raises(RowsError, match="invalid accuracy class 'sparse': choose exact or"):
        rows.best("sparse")


def test_best_needs_a_correct_row() -> None:
    failed = row(BASELINE, status="out-of-memory", reason="80 GB")
    assert Rows([failed, unreadable("other")]).best() == []
    alone = row("a", ms=1.0)
    assert Rows([failed, alone]).best() == [alone]


def test_best_is_found_for_each_device() -> None:
    rows = Rows(group_of({BASELINE: STEADY, "a": FASTER}, machine=Machine("GPU 1")))
    rows += group_of({BASELINE: STEADY, "a": SLOWER}, machine=Machine("GPU 2"))
    assert [(each.machine.device, each.kernel) for each in rows.best()] == [
        ("GPU 1", "a"),
        ("GPU 2", BASELINE),
    ]
