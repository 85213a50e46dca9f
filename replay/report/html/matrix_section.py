"""Table of kernels and kinds of call at the top of the page, readable without any script."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence

from capture.text.printable import printable
from replay.report.groups import Group, joined, told_apart
from replay.report.matrix import Cell, Matrix

MARKS = {"wrong": "✗", "same": "=", "inconclusive": "?", "cannot": "–", "baseline": "baseline"}
"""Text of cells that show no speed-up."""
WORDS = {"faster": "fast", "slower": "slow"}
"""Names of the classes that colour the cells with a speed-up."""


def short_names(groups: Sequence[Group]) -> list[str]:
    """Return names such as `flux · denoise · 1×24×4608×128`, all of them distinct."""
    several = len({group.model for group in groups}) > 1
    names = [joined(each.model if several else "", each.phase, each.shape) for each in groups]
    return told_apart(groups, names)


def matrix_table(found: Matrix) -> Iterator[str]:
    """Yield the lines of an HTML table, with a button in each cell that selects it."""
    yield (
        '<div class="scroll" tabindex="0" role="region" aria-label="Kernels and calls">'
        '<table id="matrix"><thead><tr><th scope="col">kernel</th>'
    )
    for name in short_names(found.kinds):
        yield f'<th scope="col">{html.escape(name)}</th>'
    yield "</tr></thead><tbody>"
    for kernel in found.kernels:
        rows = [row for kind in found.kinds for row in kind.rows.get(kernel, ())]
        if all(row.status == "unavailable" for row in rows):
            continue
        name = html.escape(printable(str(kernel)), quote=True)
        quantised = ' <span class="quiet">quantised</span>' if found.is_quantised(kernel) else ""
        yield f'<tr><th scope="row">{name}{quantised}</th>'
        for at in range(len(found.kinds)):
            yield _cell(found.cells[kernel, at], name, at)
        yield "</tr>"
    yield "</tbody></table></div>"


def _cell(cell: Cell, kernel: str, kind: int) -> str:
    words = WORDS.get(cell.outcome, cell.outcome)
    title = html.escape(printable(joined(cell.outcome, _interval(cell), cell.reason)), quote=True)
    return (
        f'<td class="{words}"><button type="button" aria-pressed="false" data-kernel="{kernel}" '
        f'data-kind="{kind}" title="{title}">{_text(cell)}</button></td>'
    )


def _text(cell: Cell) -> str:
    if cell.outcome in WORDS and cell.speedup is not None:
        return f"{cell.speedup.ratio:.2f}×"
    return MARKS.get(cell.outcome, cell.outcome)


def _interval(cell: Cell) -> str:
    found = cell.speedup
    if found is None or found.low is None or found.high is None:
        return ""
    return f"{found.ratio:.3f}× ({found.low:.3f}-{found.high:.3f})"
