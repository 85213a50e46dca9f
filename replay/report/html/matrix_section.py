"""Table of kernels and kinds of call at the top of the page, readable without any script."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator

from capture.text.printable import printable
from replay.report.groups import common_and_own, joined
from replay.report.matrix import MARKS, Cell, Matrix

WORDS = {"faster": "fast", "slower": "slow"}
"""Names of the classes that colour the cells with a speed-up."""


def legend() -> str:
    """Return the meaning of the marks, such as `= same speed, ✗ wrong or failed`."""
    return ", ".join(f"{mark} {meaning}" for mark, meaning in MARKS.values())


def matrix_table(found: Matrix) -> Iterator[str]:
    """Yield the lines of an HTML table, with a button in each cell that selects it."""
    yield (
        '<div class="scroll" tabindex="0" role="region" aria-label="Kernels and calls">'
        '<table id="matrix"><thead><tr><th scope="col">kernel</th>'
    )
    for name in common_and_own(found.kinds)[1]:
        yield f'<th scope="col">{_breakable(html.escape(name))}</th>'
    yield "</tr></thead><tbody>"
    for kernel in found.tried:
        name = html.escape(printable(str(kernel)), quote=True)
        is_quantised = found.class_of(kernel) == "quantised"
        quantised = ' <span class="quiet">quantised</span>' if is_quantised else ""
        yield f'<tr><th scope="row">{_breakable(name)}{quantised}</th>'
        for at in range(len(found.kinds)):
            yield _cell(found.cells[kernel, at], name, at)
        yield "</tr>"
    yield "</tbody></table></div>"


def common_part(found: Matrix) -> str:
    """Return a sentence on what all kinds of call share; empty if there is nothing."""
    common, _ = common_and_own(found.kinds)
    return html.escape(printable(f"Every kind of call: {common}.")) if common else ""


def reasons(found: Matrix) -> Iterator[str]:
    """Yield a list of the wrong kernels' reasons, and one to open of the others' reasons."""
    shown = [kernel for kernel in found.kernels if not found.is_unavailable(kernel)]
    lines: dict[bool, list[str]] = {True: [], False: []}
    for outcome, names, reason in found.reasons(shown):
        text = html.escape(printable(f"{names}: {reason}"))
        mark = MARKS[outcome][0]
        lines[outcome == "wrong"].append(f'<li><b class="{outcome}">{mark}</b> {text}')
    if lines[True]:
        yield from ('<ul class="reasons">', *lines[True], "</ul>")
    if lines[False]:
        yield "<details><summary>Reasons of the other cells without a speed-up</summary>"
        yield from ('<ul class="reasons">', *lines[False], "</ul></details>")


def _breakable(name: str) -> str:
    """Allow line breaks inside a name; hyphens allow one already."""
    return re.sub(r"(?<=[/:.@_])(?=[^\W\d])", "<wbr>", name)


def _cell(cell: Cell, kernel: str, kind: int) -> str:
    words = WORDS.get(cell.outcome, cell.outcome)
    title = html.escape(printable(joined(cell.outcome, _interval(cell), cell.reason)), quote=True)
    return (
        f'<td class="{words}"><button type="button" aria-pressed="false" data-kernel="{kernel}" '
        f'data-kind="{kind}" title="{title}">{cell.text}</button></td>'
    )


def _interval(cell: Cell) -> str:
    found = cell.speedup
    if found is None or found.low is None or found.high is None:
        return ""
    return f"{found.ratio:.3f}× ({found.low:.3f}-{found.high:.3f})"
