"""Writer of the report: page, style sheet, script, chart library and compressed data in one file.

Text from a dataset is either escaped here, or inserted by the script as text.
"""

from __future__ import annotations

import base64
import gzip
import html
import json
from collections.abc import Iterator, Sequence
from datetime import date
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from attention_replay.errors import Error
from capture.text.counted import counted
from capture.text.printable import printable
from replay.plan.plan import Budget
from replay.report.answer import answer
from replay.report.groups import Group, names_by_sentence
from replay.report.html import chart_library as library
from replay.report.html import model
from replay.report.html.data import page_data
from replay.report.html.foot import foot
from replay.report.html.matrix_section import common_part, legend, matrix_table, reasons
from replay.report.html.outputs import saved_outputs
from replay.report.html.sweep_data import sweep_data
from replay.report.matrix import matrix
from replay.rows.replacement import replacing, why_not_written
from replay.rows.row import Row
from replay.rows.row_files import plain

SCRIPTS = (
    *("drawing.js", "call_charts.js", "sweep_charts.js", "model_charts.js"),
    *("rows_table.js", "page.js"),
)
"""Files of the page's script, in the order of their use."""


class ReportError(Error):
    """Reason why a report cannot be written; the message gives the remedy."""


def write_html(
    rows: Sequence[Row],
    path: Path,
    *,
    checks: Sequence[model.Check] = (),
    outputs: Path | None = None,
    budget: Budget | None = None,
    summary: str = "",
    command: str = "",
) -> None:
    """Write one HTML file that shows the results of a replay.

    Args:
        checks: the checks that `replay verify --checks` writes.
        outputs: the directory of `--save-output`.
        budget: error limit to draw in the error charts, which use the limit's metric. By default,
            the charts use relative L1 and have no limit.
        summary: a sentence to show first; empty for none.
        command: command that writes the page, for its foot; empty for none.

    Raises:
        ReportError: the rows contain no kernel, they come from several types of device, or the file
        cannot be written.
        MissingPackage: the chart library is not installed.
    """
    found = matrix(rows)
    groups = found.kinds
    if not groups:
        raise ReportError("no row is about a kernel: replay a call first")
    devices = sorted({row.machine.device for row in rows} - {""})
    if len(devices) > 1:
        raise ReportError(
            f"the rows are of {' and '.join(devices)}, but a page is for one type of device: "
            "replay each into a file of its own, and merge them with `replay devices`"
        )
    # Checks of several models are drawn below each other.
    names = dict.fromkeys(each["model"] for each in checks)
    models = {name: [each for each in checks if each["model"] == name] for name in names}
    data: dict[str, Any] = page_data(rows, found, budget) | {
        "models": {name: model.model_data(members) for name, members in models.items()},
        "sweeps": sweep_data(found),
        "outputs": {} if outputs is None else saved_outputs(outputs, checks),
    }
    headline, *others = _sentences(models, summary, answer(found))
    page = Template(_resource("page.html")).substitute(
        title=html.escape(_title(groups)),
        machine=html.escape(_machine(rows)),
        headline=headline,
        answers="\n".join(_listed(others)),
        legend=legend(),
        common=common_part(found),
        matrix="\n".join(matrix_table(found)),
        reasons="\n".join(reasons(found)),
        unavailable="\n".join(_unavailable(rows)),
        foot="\n".join(foot(rows, command)),
        style=_resource("style.css"),
        script="\n".join(map(_resource, SCRIPTS)),
        data=_packed(json.dumps(plain(data), separators=(",", ":"))),
        library=_packed(library.bundle()),
    )
    try:
        with replacing(path) as file:
            file.write(page)
    except OSError as error:
        raise ReportError(f"cannot write {path}: {why_not_written(error)}") from error


def _title(groups: Sequence[Group]) -> str:
    models = dict.fromkeys(group.calls[0].model for group in groups)
    return printable(", ".join(name for name in models if name) or "Attention calls")


def _machine(rows: Sequence[Row]) -> str:
    """Return a line such as `NVIDIA H200 · torch 2.11.0 · 24 calls × 12 kernels that ran`."""
    parts = []
    for machine in dict.fromkeys(row.machine for row in rows if row.machine.device):
        parts.append(" · ".join([machine.device, *machine.versions]))
    calls = len({row.call.name for row in rows if row.kernel})
    kernels = len({row.id for row in rows if row.accuracy})
    return printable(
        " · ".join(
            [
                *parts[:3],
                f"{counted(calls, 'call')} × {counted(kernels, 'kernel')} that ran",
                _measured(rows),
            ]
        )
    )


def _measured(rows: Sequence[Row]) -> str:
    """Return when rows were measured, and at which commit; the page's own date if they lack it."""
    dates = sorted({row.measured_at[:10] for row in rows if row.measured_at})
    if not dates:
        return f"written {date.today()}"
    span = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    commits = [*dict.fromkeys(row.commit for row in rows if row.commit)]
    return f"measured {span}{f' at commit {commits[0]}' if len(commits) == 1 else ''}"


def _sentences(models: dict[str, list[model.Check]], summary: str, calls: str) -> Iterator[str]:
    """Yield the page's answers: the given one, the whole models' gains, and that of the calls."""
    if summary:
        yield html.escape(printable(summary[0].upper() + summary[1:]))
    for name, checks in models.items():
        for sentence in model.answers(checks):
            yield html.escape(printable(f"{name}, {sentence}"))
    yield html.escape(printable(calls))


def _listed(sentences: Sequence[str]) -> Iterator[str]:
    if sentences:
        yield '<ul class="answers">'
        yield from (f"<li>{sentence}" for sentence in sentences)
        yield "</ul>"


def _unavailable(rows: Sequence[Row]) -> Iterator[str]:
    """Yield a paragraph for each reason why kernels could not run, with the kernels' names."""
    found = names_by_sentence(
        (str(row.id), row.reason) for row in rows if row.status == "unavailable"
    )
    if not found:
        return
    yield "<details><summary>Kernels that are not available on this machine</summary>"
    for reason, kernels in found.items():
        yield f'<p class="quiet">{html.escape(printable(f"{kernels}: {reason}"))}</p>'
    yield "</details>"


def _resource(name: str) -> str:
    return files(__package__).joinpath(name).read_text("utf-8")


def _packed(text: str) -> str:
    """Compress a string, and encode it in characters that need no escaping in HTML."""
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()
