"""What a notebook shows of rows, and rows read from a file."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path, PurePath

import pytest

import replay
from replay.report.notebook import HEADINGS, Rows, read_rows
from replay.rows.row_files import RowsError, write_jsonl
from tests.factories import call_facts, row, speedup_over, unreadable

HOSTILE = "<img src=x onerror=alert(1)>&amp;\x1b[31m"


class Cells(HTMLParser):
    """The texts of a table's cells, line by line, and every tag."""

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
    assert repr(rows) == "Rows(rows=1, kernels=1, calls=1)"


def test_names_stay_text() -> None:
    facts = call_facts(HOSTILE, "", model=HOSTILE)
    cells = Cells(Rows([row(HOSTILE, facts, status="error", reason=HOSTILE)])._repr_html_())
    assert cells.tags == {"p", "table", "thead", "tbody", "tr", "th", "td"}
    assert cells.lines[1].count(HOSTILE.replace("\x1b", " ")) == 4


def test_many_rows_are_counted() -> None:
    html = Rows([row() for _ in range(100)])._repr_html_()
    assert len(Cells(html).lines) == 61
    assert html.endswith("<p>… and 40 more</p>")


def test_rows_that_never_ran() -> None:
    _, *lines = Cells(Rows([unreadable(), row(status="crash")])._repr_html_()).lines
    assert [line[HEADINGS.index("status")] for line in lines] == ["error", "crash"]


def test_rows_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    with path.open("w") as file:
        write_jsonl([row(ms=1.0), row("other")], file)
    rows = replay.read_rows(str(path))
    assert isinstance(rows, replay.Rows)
    assert list(rows) == [row(ms=1.0), row("other")]
    path.write_text(path.read_text()[:-20])
    with pytest.warns(UserWarning, match="ends within a row"):
        assert len(read_rows(path)) == 1


def test_rows_of_no_file(tmp_path: Path) -> None:
    with pytest.raises(RowsError, match=r"there is no file .*: write one with `replay --json"):
        read_rows(tmp_path / "nosuch")
    with pytest.raises(RowsError, match="there is no file nosuch"):
        read_rows(PurePath("nosuch"))
    with pytest.raises(RowsError, match="not from NoneType: give its path"):
        read_rows(None)  # type: ignore[arg-type]
