"""A table in HTML for notebooks (`_repr_html_`), with all text escaped."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import islice

from capture.text.printable import printable

MOST_LINES = 60
"""Maximum number of lines in a table, as in pandas."""

LONG_TEXT = 60
"""Length in characters above which the text of a cell may wrap."""


def html_table(
    headings: Sequence[str], lines: Sequence[Sequence[object]], above: Sequence[str] = ()
) -> str:
    """Return a table of at most `MOST_LINES` lines; numbers are right-aligned, with four digits.

    Args:
        above: sentences to put above the table.
    """
    rest = len(lines) - MOST_LINES
    parts = [
        *(f"<p>{_text(sentence)}</p>" for sentence in above),
        "<table><thead>",
        _line("th", headings),
        "</thead><tbody>",
        *(_line("td", line) for line in islice(lines, MOST_LINES)),
        "</tbody></table>",
        f"<p>… and {rest} more</p>" if rest > 0 else "",
    ]
    return "".join(parts)


def _line(tag: str, cells: Sequence[object]) -> str:
    line = []
    for cell in cells:
        side = "left" if isinstance(cell, str) else "right"
        text = f"{cell:.4g}" if isinstance(cell, float) else "" if cell is None else str(cell)
        wrap = "" if len(text) > LONG_TEXT else "; white-space: nowrap"
        line.append(f'<{tag} style="text-align: {side}{wrap}">{_text(text)}</{tag}>')
    return f"<tr>{''.join(line)}</tr>"


def _text(text: str) -> str:
    return escape(printable(text))
