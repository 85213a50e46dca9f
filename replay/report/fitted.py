"""Table that wraps text at spaces before it breaks a name or a number, unlike rich's own tables."""

from __future__ import annotations

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Column, Table
from rich.text import Text


class FittedTable(Table):
    """Table whose columns get the width of their longest word, then that of their longest line.

    A column with `no_wrap` gets the width of its longest line at once. Text in a column with a
    `min_width`, such as a module's path, may be broken anywhere until the column has that width. If
    the words still do not fit, the longest words are broken.
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
    """Return the width of each column, excluding its padding."""
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
