"""Comparisons as Markdown short enough for a comment on a pull request."""

from __future__ import annotations

import re
from collections.abc import Sequence

from replay.report.comparison.sections import Sections, Table

BUDGET = 59_000
"""Maximum size of the text in bytes; GitHub accepts 65,536 characters in a comment."""

LONGEST = 200
"""Maximum length of a cell or a sentence, in characters."""

NOTES = 10
"""Maximum number of sentences about how two runs were compared."""


def to_markdown(compared: Sequence[Sections]) -> str:
    """Write the comparisons in order, with as many table lines as fit.

    Names from the rows are escaped, so they cannot become Markdown, HTML, mentions or links.
    """
    heads = [_head(contents) for contents in compared]
    left = BUDGET - _size(_left_out(len(heads)))
    written: list[str] = []
    for at, (contents, head) in enumerate(zip(compared, heads, strict=True)):
        share = left // (len(heads) - at)
        if _size(head) > left:
            written.append(_left_out(len(heads) - at))
            break
        text = head + _tables(contents, share - _size(head))
        left -= _size(text)
        written.append(text)
    return "".join(written)


def _head(contents: Sections) -> str:
    notes = "".join(f"- {escaped(note)}\n" for note in contents.notes[:NOTES])
    sign = "🔴" if contents.is_worse else "🟢"
    return f"### {escaped(contents.title)}\n\n{sign} {escaped(contents.answer)}\n\n{notes}"


def _tables(contents: Sections, budget: int) -> str:
    written = ""
    for table in (contents.counts, *contents.tables):
        written += _table(table, budget - _size(written))
    return f"{written}\n"


def _table(table: Table, budget: int) -> str:
    """Return the lines that fit, and the number of omitted lines; empty if no line fits."""
    text = (
        f"\n**{escaped(table.title)}**\n\n"
        f"| {' | '.join(map(escaped, table.headings))} |\n"
        f"|{'---|' * len(table.headings)}\n"
    )
    left = budget - _size(text) - _size(_left_out(len(table.lines)))
    if left < 0:
        return ""
    for at, cells in enumerate(table.lines):
        line = f"| {' | '.join(map(escaped, cells))} |\n"
        left -= _size(line)
        if left < 0:
            return text + _left_out(len(table.lines) - at)
        text += line
    return text


def _left_out(count: int) -> str:
    return f"\nand {count} more\n"


def _size(text: str) -> int:
    return len(text.encode())


def escaped(text: str) -> str:
    """Escape text for GitHub: words with a special meaning in Markdown become `<code>`.

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
