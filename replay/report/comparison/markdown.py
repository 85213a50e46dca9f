"""Comparisons as Markdown, short enough for a comment on a pull request."""

from __future__ import annotations

import re
from collections.abc import Sequence

from replay.report.comparison.sections import LINES, Sections, Table

BUDGET = 65_000
"""Maximum size of the text in bytes; GitHub accepts 65,536 characters in a comment."""

LONGEST = 200
"""Maximum length of a cell or a sentence, in characters."""

NOTES = 10
"""Maximum number of sentences on how two runs were compared."""


def to_markdown(compared: Sequence[Sections]) -> str:
    """Format comparisons in order; omit table lines if the text would be too long.

    Names from the rows are escaped, so they cannot become Markdown, HTML, mentions or links.
    """
    for lines in (LINES, LINES // 4, 0):
        text = "".join(_comparison(contents, lines) for contents in compared)
        if len(text.encode()) <= BUDGET:
            break
    return text


def _comparison(contents: Sections, lines: int) -> str:
    notes = "".join(f"- {escaped(note)}\n" for note in contents.notes[:NOTES])
    sign = "🔴" if contents.is_worse else "🟢"
    head = f"### {escaped(contents.title)}\n\n{sign} {escaped(contents.answer)}\n\n{notes}"
    tables = (contents.counts, *contents.tables)
    return head + "".join(_table(table, lines) for table in tables) + "\n"


def _table(table: Table, lines: int) -> str:
    left_out = len(table.lines) - lines
    return (
        f"\n**{escaped(table.title)}**\n\n"
        + markdown_table([table.headings, *table.lines[:lines]])
        + (f"\nand {left_out} more\n" if left_out > 0 else "")
    )


def markdown_table(lines: Sequence[Sequence[str]]) -> str:
    """Format a table as Markdown; the first line contains the headings."""
    headings, *others = lines
    rows = [headings, ["---"] * len(headings), *others]
    return "".join(f"| {' | '.join(map(escaped, cells))} |\n" for cells in rows)


def escaped(text: str) -> str:
    """Escape text for GitHub, and wrap words with a special meaning in Markdown in `<code>`.

    Inside `<code>`, names with an @ or a # are neither mentions nor references.
    """
    short = text if len(text) <= LONGEST else f"{text[:LONGEST]}…"
    return re.sub(r"\S+", _word, short)


def _word(found: re.Match[str]) -> str:
    word = found[0]
    if re.fullmatch(r"[\w×→…·%,():;/+.-]+", word) and not re.search(r"\b_|_\b|__|www|://", word):
        return word
    inner = re.sub(r"[^\w/-]|_", lambda each: f"&#{ord(each[0])};", word)
    return f"<code>{inner}</code>"
