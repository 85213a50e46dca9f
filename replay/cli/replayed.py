"""Replay as the verbs run it: write each row when it is measured, then print the tables.

The module imports torch only when it is needed.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from capture.text.printable import printable
from replay.api.call_choices import CallChoice
from replay.api.choices import ReplayRequest
from replay.api.messages import say
from replay.api.outcome import Outcome
from replay.api.session import Session
from replay.cli.files import (
    INCONCLUSIVE,
    NotWritten,
    UsageError,
    check_files,
    noted,
    opened,
    say_unwritten,
    stdout_is_taken,
)
from replay.cli.report import write
from replay.cli.requests import metrics_of, request_of
from replay.cli.stdout import reserved_stdout
from replay.report.html import chart_library
from replay.rows.row import INTERRUPTED_BLOCKS
from replay.rows.row_files import save_jsonl, write_jsonl

if TYPE_CHECKING:
    from rich.console import Console

    from capture.storage.dataset import Dataset
    from replay.end_to_end.model_check import ModelResult
    from replay.plan.plan import Plan
    from replay.rows.row import Row
    from replay.workers.execution import Assignment
    from replay.workers.process import First

logger = logging.getLogger(__name__)

OF_ALL_CALLS = ("out", "checks")
"""Options for outputs that require a complete replay."""

FOR_TABLES = ("details", "metric", "per_call", "backward")
"""Options that print the tables of each kind of call below the matrix."""

HARMLESS = ("ok", "not-timed", "unsupported", "unavailable")
"""Statuses of a row that `--check` accepts."""


@dataclass(frozen=True)
class Replayed:
    """Result of a replay whose tables have been printed."""

    rows: list[Row]
    dataset: Dataset | None
    """The recording; None if the calls are not recorded."""
    assigned: Assignment
    pythons: dict[str, str]
    unwritten: list[str] = field(default_factory=list)
    """Sentences about files that are missing or incomplete, with the reasons."""


def show(arguments: argparse.Namespace, calls: CallChoice) -> int:
    """Replay calls, print and write all requested results, and return the exit code.

    Raises:
        Error: an argument cannot be used.
    """
    check_files(arguments)
    request = request_of(arguments, calls)
    page = arguments.report
    if page:
        chart_library.require()
    replay = replayed(request, arguments, one_type="--report" if page else "")
    if page:
        with noted(replay.unwritten):
            write(replay.rows, page)
    code = exit_code(replay, check=arguments.check)
    print_next_step(arguments, replay)
    return code


def print_next_step(
    arguments: argparse.Namespace,
    replay: Replayed,
    plan: Plan | None = None,
    **in_model: Any,
) -> None:
    """Print the next step, unless hints are off, a file is missing, or stdout carries a file.

    Args:
        in_model: results of `replay verify` for `next_step`.
    """
    if not (arguments.quiet or replay.unwritten or stdout_is_taken(arguments)):
        from replay.cli.next_step import next_step

        if found := next_step(arguments, replay.rows, plan, replay.dataset, **in_model):
            # Do not wrap the line, because a command with line breaks cannot be pasted.
            print(f"next: {printable(found)}", file=sys.stderr)
    logger.info("all is printed")


def replayed(
    request: ReplayRequest,
    arguments: argparse.Namespace,
    *,
    early: First | None = None,
    one_type: str = "",
) -> Replayed:
    """Replay, write the rows call by call, and print the tables.

    Measured rows are kept after Ctrl-C, or if a file cannot be written.

    Args:
        early: worker processes that are already started.
        one_type: option that requires a single type of device; empty if there is none.

    Raises:
        Error: an argument cannot be used, or the replay ended early.
    """
    from replay.report.replay_tables import print_tables

    metrics = metrics_of(arguments)
    given = vars(arguments)
    with Session(request, early=early, quiet=arguments.quiet) as session:
        if one_type and len(session.machines) > 1:
            types = " and ".join(machine.device for machine in session.machines)
            raise UsageError(
                f"{one_type} requires devices of one type, but this cluster has {types}: leave "
                "it out, or replay on a cluster of one type"
            )
        outcome, unwritten, ended_by = _written(session, arguments)
        logger.info("every row is there")
    rows = outcome.rows
    if not stdout_is_taken(arguments) and (rows or ended_by is None):
        print_tables(
            rows,
            session.machines,
            session.settings,
            metrics,
            details="metric" in given and any(map(given.get, FOR_TABLES)),
            per_call=given.get("per_call", False),
            versus_random=given.get("versus_random", False),
        )
        for capture in session.dataset.captures if session.dataset else ():
            if capture.most_gain:
                print(printable(f"{capture.model}: {capture.most_gain}"))
    if ended_by is not None:
        page = given.get("report")
        if page and rows and isinstance(ended_by, KeyboardInterrupt):
            with noted(unwritten):
                write(rows, page)
        say_unwritten(unwritten)
        raise ended_by
    return Replayed(rows, session.dataset, session.assigned, session.pythons, unwritten)


def exit_code(replay: Replayed, checks: Sequence[ModelResult] = (), *, check: bool = False) -> int:
    """Print unreadable calls to stderr, and return the exit code.

    If `check`, print failures too, and the smallest slowdown that the rows could have shown.
    """
    rows = replay.rows
    unreadable = [row for row in rows if not row.kernel]
    was_any = len(unreadable) < len(rows)
    rest = "the other calls were replayed" if was_any else "no call could be replayed, record anew"
    for row in unreadable:
        say(f"{row.reason}; {rest}")
    failed = {f"{row.id} ({row.status})" for row in rows if row.status not in HARMLESS}
    failed |= {
        f"{checked.kernel} in {checked.model} ({'wrong' if checked.wrong else checked.status})"
        for checked in checks
        if checked.status not in ("ok", "unsupported") or checked.wrong
    }
    if check and failed:
        say(f"failed: {', '.join(sorted(failed))}")
    if check and (smallest := _smallest_slowdown(rows)):
        say(smallest)
    code = 1 if unreadable or (check and failed) else 0
    code = max(code, say_unwritten(replay.unwritten))
    unclear = {
        str(row.id)
        for row in rows
        if (row.speedup and row.speedup.reason == "interrupted") or INTERRUPTED_BLOCKS in row.flags
    }
    if not (check and unclear) or code:
        return code
    names = ", ".join(sorted(unclear))
    say(
        f"inconclusive: other programs interrupted too many samples of {names}; run this again "
        "when the machine is less busy"
    )
    return INCONCLUSIVE


def _smallest_slowdown(rows: Sequence[Row]) -> str:
    from replay.comparison.speed_change import smallest_in_words

    found = [row.speedup for row in rows if row.speedup is not None]
    shares = [None if each.high is None else each.high / each.ratio - 1 for each in found]
    return smallest_in_words(shares, "against the baseline")


def console_of(arguments: argparse.Namespace) -> Console:
    """Return the console for tables, which is on stderr if stdout carries a file."""
    from rich.console import Console

    return Console(highlight=False, stderr=stdout_is_taken(arguments))


def _written(
    session: Session, arguments: argparse.Namespace
) -> tuple[Outcome, list[str], BaseException | None]:
    """Measure and write rows; return them, sentences on unwritten files, and any early error."""
    json_file = arguments.json
    # Resolve the path now, because kernels may change the current directory.
    kept_in = None if json_file in (None, "-") else Path(json_file).absolute()
    unwritten: list[str] = []
    ended_by: BaseException | None = None
    with reserved_stdout() as stdout:
        try:
            is_resumed = vars(arguments).get("resume", False)
            _follow(session, json_file, stdout, is_resumed, unwritten)
        except (KeyboardInterrupt, Exception) as error:
            ended_by = error
        outcome = session.outcome(is_early_end=ended_by is not None)
    if unwritten or not outcome.is_in_order:
        unwritten = _written_again(outcome.all_rows, kept_in, unwritten)
    left_out = outcome.left_out
    if left_out:
        left_out += "; give --json FILE, so that --resume can complete it"
        if kept_in is not None and kept_in.is_file():
            left_out = f"{outcome.left_out}; the same command with --resume completes {json_file}"
    if isinstance(ended_by, KeyboardInterrupt):
        ended_by = KeyboardInterrupt(_interruption(left_out, outcome, arguments))
    elif left_out and outcome.why_left_out:
        say(f"{outcome.why_left_out}: {left_out}")
    return outcome, unwritten, ended_by


def _follow(
    session: Session,
    json_file: str | None,
    stdout: TextIO,
    append: bool,
    not_followed: list[str],
) -> None:
    """Measure all rows and write each at once; continue the replay if writing fails."""
    with contextlib.closing(session.rows()) as produced:
        with noted(not_followed, NotWritten), opened(json_file, stdout, append=append) as file:
            if file is not None:
                write_jsonl(produced, file)
        for sentence in not_followed:
            say(f"{sentence}; the replay goes on")
        for _ in produced:
            pass


def _written_again(rows: Sequence[Row], path: Path | None, not_followed: list[str]) -> list[str]:
    """Write all rows again, in order; return the reasons why a file could not be written.

    Args:
        path: path of the JSON file; None if no file was requested.
        not_followed: reasons why rows could not be written immediately.
    """
    if path is None or not rows:
        return not_followed
    if path.exists() and not path.is_file():
        return not_followed  # a pipe or a device cannot be rewritten
    again: list[str] = []
    with noted(again):
        save_jsonl(rows, path)
    return again


def _interruption(left_out: str, outcome: Outcome, arguments: argparse.Namespace) -> str:
    """Describe the results that are missing after an interrupted replay."""
    given = vars(arguments)
    if not outcome.all_rows:
        path = given.get("json")
        kept = f", and {path} stayed as before" if path and os.path.isfile(path) else ""
        return f"no call was replayed{kept}"
    needs_all = OF_ALL_CALLS if outcome.rows else ("report", *OF_ALL_CALLS)
    options = [f"--{name}" for name in needs_all if given.get(name)]
    not_made = f"not made: {', '.join(options)}" if options else ""
    is_partial = bool(outcome.rows and given.get("report"))
    partial = f"{given['report']} shows the calls that were measured whole" if is_partial else ""
    return "; ".join(filter(None, (not_made, partial, left_out)))
