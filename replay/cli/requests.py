"""Conversion of parsed arguments to the library's request objects. Imports no torch."""

from __future__ import annotations

import argparse
import difflib
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from replay.api.call_choices import CallChoice, RecordedCalls
from replay.api.choices import MeasureChoice, ReplayRequest, RunPlace
from replay.cli.files import UsageError
from replay.cli.shared_options import ALL_METRICS, DEFAULT_METRICS, REQUESTED_METRICS
from replay.rows.fields import COLUMNS

T = TypeVar("T")


def chosen(kind: type[T], arguments: argparse.Namespace, **others: Any) -> T:
    """Make a dataclass object from the arguments that have the same names as its fields.

    Args:
        others: values of fields that have no argument, or that replace an argument.
    """
    names = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    given = {name: value for name, value in vars(arguments).items() if name in names}
    if "env" in given:
        given["env"] = tuple(given["env"])
    return kind(**given | others)


def request_of(
    arguments: argparse.Namespace,
    calls: CallChoice,
    *,
    for_model: bool = False,
    kernels: str | None = None,
) -> ReplayRequest:
    """Check the arguments and return the replay that they request.

    Args:
        for_model: True if the rows predict a model's gain.
        kernels: kernels to run if the arguments name none.

    Raises:
        Error: an argument cannot be used.
    """
    resume = None
    if vars(arguments).get("resume"):
        if arguments.json in (None, "-"):
            raise UsageError("--resume requires a file to continue: give --json FILE")
        resume = Path(arguments.json).absolute()  # a kernel may change the current directory
    request = ReplayRequest(
        calls,
        kernels if arguments.kernels is None else arguments.kernels,
        measure_of(arguments, for_model=for_model),
        chosen(RunPlace, arguments),
        vars(arguments).get("max_time"),
        resume,
    )
    request.check()
    return request


def measure_of(arguments: argparse.Namespace, *, for_model: bool = False) -> MeasureChoice:
    """Return the requested settings of timing and judging."""
    wanted = metrics_of(arguments)
    metrics = [name for name in ("energy", "roofline") if {name, "all"} & {*wanted}]
    if vars(arguments).get("report"):
        metrics.append("roofline")
    metrics += [name for name in REQUESTED_METRICS if name in wanted]
    named = "backward" in wanted and vars(arguments).get("metric") is not None
    return chosen(
        MeasureChoice,
        arguments,
        metrics=tuple(metrics),
        backward=named or vars(arguments).get("backward", False),
        for_model=for_model,
    )


def recorded_calls(arguments: argparse.Namespace) -> RecordedCalls:
    """Return the choice of recorded calls that the arguments make."""
    names = vars(arguments).get("call")
    return chosen(RecordedCalls, arguments, where=arguments.dir, names=names)


def metrics_of(arguments: argparse.Namespace) -> list[str]:
    """Return the metrics that `--metric` lists, by name or by the heading of a column.

    Raises:
        UsageError: `--metric` lists no name, or an unknown one.
    """
    given: str | None = vars(arguments).get("metric")
    text = DEFAULT_METRICS if given is None else given
    parts = [part.strip() for part in text.split(",") if part.strip()]
    known = {column.heading.lower(): column.metric for column in COLUMNS.values()}
    known |= {metric: metric for metric in ALL_METRICS}
    metrics = [*dict.fromkeys(known.get(part.lower(), part) for part in parts)]
    if not metrics:
        raise UsageError(f"--metric is empty: choose from {', '.join(ALL_METRICS)}")
    for metric in metrics:
        if metric not in ALL_METRICS:
            near = difflib.get_close_matches(metric, ALL_METRICS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"choose from {', '.join(ALL_METRICS)}"
            raise UsageError(f"unknown metric {metric!r}: {hint}")
    return metrics
