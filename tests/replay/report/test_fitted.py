"""Narrow tables break words, but lose no text."""

import pytest
from rich.text import Text

from replay.report.fitted import FittedTable
from tests.printed import printed

CELLS = ("triton-sparse-decode", "1234.5", "1234-5678", "12.34× (12.33-12.35)", "1234", "1234.5")
PATH = "transformer.single_transformer_blocks.0.attn"


def shown(width: int) -> list[str]:
    table = FittedTable()
    for heading in ("kernel", "time ms", "p10-p90", "speed-up", "TFLOPS", "falls back", "at"):
        table.add_column(heading, overflow="fold", min_width=4 if heading == "at" else None)
    table.add_row(*map(Text, (*CELLS, PATH)))
    return printed(lambda console: console.print(table), width=width).splitlines()


@pytest.mark.parametrize("width", [72, 80, 100, 200])
def test_names_and_numbers_stay_whole(width: int) -> None:
    lines = shown(width)
    assert max(map(len, lines)) <= width
    assert set(" ".join(CELLS).split()) <= set(" ".join(lines).split())
    if width == 200:
        assert len(lines) == 2


def test_table_cuts_nothing_when_words_do_not_fit() -> None:
    """Columns with a minimum width make Rich cut off text at the right edge."""
    lines = shown(50)
    assert max(map(len, lines)) <= 50
    text = "".join(lines)
    assert all(text.count(each) >= cell.count(each) for cell in (*CELLS, PATH) for each in cell)
