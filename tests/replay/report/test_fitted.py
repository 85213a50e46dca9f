"""Narrow tables break words, but lose no text."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.text import Text

from replay.report.fitted import FittedTable

CELLS = ("triton-sparse-decode", "1234.5", "1234-5678", "12.34× (12.33-12.35)", "1234", "1234.5")
PATH = "transformer.single_transformer_blocks.0.attn"


def printed(width: int) -> list[str]:
    table = FittedTable()
    for heading in ("kernel", "time ms", "p10-p90", "speed-up", "TFLOPS", "falls back", "at"):
        table.add_column(heading, overflow="fold", min_width=4 if heading == "at" else None)
    table.add_row(*map(Text, (*CELLS, PATH)))
    file = io.StringIO()
    Console(file=file, width=width).print(table)
    return file.getvalue().splitlines()


@pytest.mark.parametrize("width", [72, 80, 100, 200])
def test_names_and_numbers_stay_whole(width: int) -> None:
    lines = printed(width)
    assert max(map(len, lines)) <= width
    assert set(" ".join(CELLS).split()) <= set(" ".join(lines).split())
    if width == 200:
        assert len(lines) == 2


def test_table_cuts_nothing_when_words_do_not_fit() -> None:
    """Columns with a minimum width make Rich cut off text at the right edge."""
    lines = printed(50)
    assert max(map(len, lines)) <= 50
    for characters in (*CELLS, PATH):
        assert all("".join(lines).count(each) >= characters.count(each) for each in characters)
