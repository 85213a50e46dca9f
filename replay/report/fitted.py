"""Table that wraps text at spaces first, and breaks words only if it must, unlike rich's tables."""

from __future__ import annotations

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Column, Table
from rich.text import Text


class FittedTable(Table):
    """Table with columns as wide as their longest word, or longest line if there is room.

    A column with `no_wrap` is as wide as its longest line. A column with `min_width`, such as that
    of module paths, may be narrower than its longest word. If the columns still do not fit, the
    widest ones become narrower, which breaks words.
    """

    def __init__(self, *headings: str) -> None:
        super().__init__(box=None, pad_edge=False, header_style="cyan", padding=(0, 1, 0, 0))
        for heading in headings:
            self.add_column(Text(heading), overflow="fold")

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        widths = _widths(self.columns, options.max_width - len(self.columns))
        for column, width in zip(self.columns, widths, strict=True):
            column.width = width
        yield from super().__rich_console__(console, options)


def _widths(columns: list[Column], room: int) -> list[int]:
    """Return the width of each column, excluding the padding."""
    texts = [[str(each) for each in (column.header, *column.cells)] for column in columns]
    whole = [max(cell_len(line) for text in each for line in text.split("\n")) for each in texts]
    widths = [
        max(cell_len(word) for text in each for word in text.split() or [""]) for each in texts
    ]
    for at, column in enumerate(columns):
        widths[at] = whole[at] if column.no_wrap else min(widths[at], column.min_width or room)
    foldable = [at for at, column in enumerate(columns) if not column.no_wrap]
    while sum(widths) > room and any(widths[at] > 1 for at in foldable):
        widths[max(foldable, key=lambda at: widths[at])] -= 1
    for at, wanted in enumerate(whole):
        widths[at] += max(0, min(wanted - widths[at], room - sum(widths)))
    return widths
