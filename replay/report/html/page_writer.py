"""Writer of the report: page, style sheet, script, chart library and compressed data in one file.

Text from a dataset is either escaped here, or inserted by the script as text.
"""

from __future__ import annotations

import base64
import gzip
import html
import json
from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from attention_replay.errors import Error
from capture.text.counted import counted
from capture.text.printable import printable
from replay.plan.plan import Budget
from replay.report.groups import Group, group_rows, names_by_sentence
from replay.report.html import chart_library as library
from replay.report.html import model
from replay.report.html.data import page_data
from replay.report.html.outputs import saved_outputs
from replay.report.ranking import details, fastest
from replay.rows.replacement import replacing, why_not_written
from replay.rows.row import Row
from replay.rows.row_files import plain

MOST_ANSWERS = 12
"""Maximum number of kinds of calls that have their own sentence at the top."""


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
) -> None:
    """Write one HTML file that shows the results of a replay.

    Args:
        checks: the checks that `replay verify --checks` writes.
        outputs: the directory of `--save-output`.
        budget: error limit to draw in the error charts, which use the limit's metric. By default,
            the charts use relative L1 and have no limit.
        summary: a sentence to show first; empty for none.

    Raises:
        ReportError: the rows contain no kernel, they come from several types of device, or the file
        cannot be written.
        MissingPackage: the chart library is not installed.
    """
    groups = group_rows(rows)
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
    data: dict[str, Any] = page_data(rows, groups, budget) | {
        "models": {name: model.model_data(members) for name, members in models.items()},
        "outputs": {} if outputs is None else saved_outputs(outputs, checks),
    }
    page = Template(_resource("page.html")).substitute(
        title=html.escape(_title(groups)),
        machine=html.escape(_machine(rows)),
        answers="\n".join(_answers(groups, models, summary)),
        unavailable="\n".join(_unavailable(rows)),
        style=_resource("style.css"),
        script=_resource("page.js"),
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
    """Return a line such as `NVIDIA H200 · torch 2.11.0 · cuda 13.0 · 24 calls × 12 kernels`."""
    parts = []
    for machine in dict.fromkeys(row.machine for row in rows if row.machine.device):
        versions = [
            f"{name} {version}"
            for name in ("torch", "cuda", "triton")
            if (version := getattr(machine, name))
        ]
        parts.append(" · ".join([machine.device, *versions]))
    calls = len({row.call.name for row in rows if row.kernel})
    kernels = len({row.id for row in rows if row.accuracy})
    return printable(
        " · ".join(
            [*parts[:3], f"{counted(calls, 'call')} × {counted(kernels, 'kernel')} that ran"]
        )
    )


def _answers(
    groups: Sequence[Group], models: dict[str, list[model.Check]], summary: str
) -> Iterator[str]:
    """Yield list items, which start with the summary and the speed of the whole models."""
    if summary:
        yield f"<li><b>{html.escape(printable(summary))}</b>"
    for name, checks in models.items():
        for sentence in model.answers(checks):
            yield f"<li><b>{html.escape(printable(name))}</b>, {html.escape(printable(sentence))}"
    for group in groups[:MOST_ANSWERS]:
        answer = "; ".join(
            f"fastest {accuracy_class} kernel: {found.kernel}{details(group, found)}"
            for accuracy_class in ("exact", "quantised")
            if (found := fastest(group, accuracy_class))
        )
        answer = printable(answer or "no kernel was both timed and correct")
        yield f"<li>{html.escape(group.title)}<br><b>{html.escape(answer)}</b>"
    if (more := len(groups) - MOST_ANSWERS) > 0:
        yield f"<li>{more} more kinds of calls are among the charts."


def _unavailable(rows: Sequence[Row]) -> Iterator[str]:
    """Yield a paragraph for each reason why kernels could not run, with the kernels' names."""
    found = names_by_sentence(
        (str(row.id), row.reason) for row in rows if row.status == "unavailable"
    )
    for reason, kernels in found.items():
        yield f'<p class="quiet">{html.escape(printable(f"{kernels}: {reason}"))}</p>'


def _resource(name: str) -> str:
    return files(__package__).joinpath(name).read_text("utf-8")


def _packed(text: str) -> str:
    """Compress a string, and encode it in characters that need no escaping in HTML."""
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()
