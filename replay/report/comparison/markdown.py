"""Markdown for GitHub, in which text from rows stays text."""

from __future__ import annotations

import re
from collections.abc import Sequence

LONGEST = 200
"""Maximum length of a cell or a sentence, in characters."""


def markdown_table(lines: Sequence[Sequence[str]]) -> str:
    """Format a table as Markdown; the first line contains the headings."""
    return plain_table([[*map(escaped, cells)] for cells in lines])


def plain_table(lines: Sequence[Sequence[str]]) -> str:
    """Format a table whose cells are Markdown already."""
    headings, *others = lines
    rows = [headings, ["---"] * len(headings), *others]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in rows)


def escaped(text: str, longest: int = LONGEST) -> str:
    """Escape text for GitHub, and wrap words with a special meaning in Markdown in `<code>`.

    Inside `<code>`, names with an @ or a # are neither mentions nor references.
    """
    short = text if len(text) <= longest else f"{text[:longest]}…"
    return re.sub(r"\S+", _word, short)


def _word(found: re.Match[str]) -> str:
    word = found[0]
    if re.fullmatch(r"[\w×→…·%,():;/+.-]+", word) and not re.search(r"\b_|_\b|__|www|://", word):
        return word
    inner = re.sub(r"[^\w/-]|_", lambda each: f"&#{ord(each[0])};", word)
    return f"<code>{inner}</code>"
