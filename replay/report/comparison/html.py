"""Comparisons as one page of HTML that loads nothing and runs nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from replay.report.comparison.sections import Sections, Table

LINES = 5000
"""Of a table; JSON has all."""

STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.3rem; margin-top: 3rem; overflow-wrap: anywhere; }
h2 { font-size: 1rem; margin: 2rem 0 .5rem; }
.answer { font-weight: 600; overflow-wrap: anywhere; }
.worse { border-left: .3rem solid #d55e00; padding-left: .7rem; }
ul { padding-left: 1.2rem; opacity: .8; overflow-wrap: anywhere; }
div { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: left; vertical-align: top; padding: .25rem .8rem .25rem 0;
  border-bottom: 1px solid #8884; overflow-wrap: break-word; max-width: 24rem; }
"""


def to_html(compared: Sequence[Sections]) -> str:
    """Write the comparisons one after the other; every text is escaped."""
    title = escape(compared[0].title) if compared else ""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        f"<title>{title}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        f"{''.join(map(_section, compared))}</body>\n</html>\n"
    )


def _section(said: Sections) -> str:
    worse = " worse" if said.is_worse else ""
    notes = "".join(f"<li>{escape(note)}</li>\n" for note in said.notes)
    tables = "".join(map(_table, (said.counts, *said.tables)))
    return (
        f'<h1>{escape(said.title)}</h1>\n<p class="answer{worse}">{escape(said.answer)}</p>\n'
        f"<ul>\n{notes}</ul>\n{tables}"
    )


def _table(table: Table) -> str:
    lines = "".join(f"<tr>{_cells('td', line)}</tr>\n" for line in table.lines[:LINES])
    more = len(table.lines) - LINES
    left_out = f"<p>and {more} more</p>\n" if more > 0 else ""
    return (
        f"<h2>{escape(table.title)}</h2>\n<div><table>\n"
        f"<thead><tr>{_cells('th', table.headings)}</tr></thead>\n<tbody>\n{lines}</tbody>\n"
        f"</table></div>\n{left_out}"
    )


def _cells(tag: str, texts: Iterable[str]) -> str:
    return "".join(f"<{tag}>{escape(text)}</{tag}>" for text in texts)
