"""The replay itself: how long it will take, what comes first, and where its rows go."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import sys
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from capture.text.counted import counted
from capture.text.printable import printable
from replay.bench.resume import finished_rows, label_of, latest
from replay.bench.settings import Settings
from replay.cli.files import NotWritten, noted, opened
from replay.cli.kernels import able_kernels
from replay.cli.progress import Pace, shown_progress
from replay.cli.stdout import reserved_stdout
from replay.cli.time_limit import TimeLimit, in_words
from replay.distribution.estimate import History, Rates, expected_seconds, together
from replay.report.benchmark_json import benchmark_entries
from replay.rows.row import Machine, Row
from replay.rows.row_files import plain, save_jsonl, write_csv, write_jsonl
from replay.workers.execution import Assignment, Execution
from replay.workers.process import Stopped
from replay.workloads.representative import tiers
from replay.workloads.schedule import Schedule
from replay.workloads.workload import Workload

logger = logging.getLogger(__name__)

LONG_SECONDS = 30.0
"""What takes less is not announced: it is done before one has decided to wait."""

NOT_COMPARED = ("--rounds", "--max-seconds", "--max-noise", "--seed", "--resources")
"""What rows do not say they were measured with, so that `--resume` cannot see it change."""

OF_ALL_CALLS = (
    *("benchmark_json", "compare_to", "save_baseline", "plan", "e2e", "e2e_json", "report", "plot"),
)
"""Options for what is made of a whole replay, and not of one that was interrupted."""


class Replayed(NamedTuple):
    """What a replay measured."""

    rows: list[Row]
    """In the order of the calls, those of a resumed file included."""
    unwritten: list[str]
    """Which files are not there as they should be and why, a sentence each."""
    ended_by: BaseException | None
    """What ended it early, to be raised once the rows are shown; None if nothing did."""


@dataclass
class Part:
    """Calls to replay with the same kernels."""

    assigned: Assignment
    calls: list[Workload]
    tiers: list[int]
    """Of the calls (`replay.workloads.representative`), all equal if there is time for all."""
    pace: Pace
    kernels: int
    """How many there are."""

    @property
    def seconds(self) -> float:
        """How long it may take, compiling apart."""
        expected = [self.pace.expected[call.label] for call in self.calls]
        return together(expected, self.pace.at_a_time) * (self.pace.scale or 1.0)


def run(
    workloads: list[Workload],
    assigned: Assignment,
    settings: Settings,
    where: Execution,
    limit: TimeLimit,
    arguments: argparse.Namespace,
) -> Replayed:
    """Replay the calls, or what is left of them, and write rows as the arguments say.

    JSON is written call by call, so that an interrupted run keeps what it measured. Neither Ctrl-C
    nor a file that cannot be written costs what was measured: of an early end, the rows returned
    are those of complete calls.
    """
    machines, history = where.machines(settings.device), History()
    told = {}
    if limit.seconds is not None:
        told = dict(zip((call.name for call in workloads), tiers(workloads), strict=True))
    if len(machines) > 1:
        workloads = [replace(call, on=each.device) for each in machines for call in workloads]
    places = {workload.label: place for place, workload in enumerate(workloads)}
    stages = [assigned]
    if (first := without_variants(assigned)) is not None:
        stages.insert(0, first)
    every_stage = stages
    rows: list[Row] = []
    left = [workloads] * len(stages)
    if arguments.resume:
        path = Path(arguments.json)
        rows, left = _resumed(path, workloads, stages, machines, settings)
        save_jsonl(rows, path)
        if rows and not arguments.quiet:
            kept = {label_of(row, machines) for row in rows} - {call.label for call in left[-1]}
            print(f"replay: {_kept(len(kept), len(left[-1]))}", file=sys.stderr)
    if limit.seconds is None:  # no part comes before another
        stages, left = stages[-1:], left[-1:]
    rates, scale = Rates.of(settings.device), history.scale(machines)
    parts = []
    for stage, calls in zip(stages, left, strict=True):
        able = {name: able_kernels(those, settings.device) for name, those in stage.items()}
        expected = expected_seconds(calls, able, settings, rates)
        pace = Pace(expected, where.at_a_time, scale)
        if calls:
            kernels = len({each.name for those in able.values() for each in those})
            parts.append(
                Part(stage, calls, [told.get(call.name, 0) for call in calls], pace, kernels)
            )
    # Kernels may change the current directory.
    json_file = None if arguments.json in (None, "-") else Path(arguments.json).absolute()
    unwritten: list[str] = []
    not_followed: list[str] = []
    ended_by: BaseException | None = None
    with reserved_stdout() as stdout:
        is_long = limit.seconds is not None or sum(part.seconds for part in parts) >= LONG_SECONDS
        if parts and is_long and not arguments.quiet:
            print(f"replay: {_announced(parts, machines, limit, scale)}", file=sys.stderr)
        measured = _measured(parts, settings, where, limit, arguments.quiet)
        try:
            with contextlib.closing(measured):
                produced = _collected(measured, rows)
                with (
                    noted(not_followed, NotWritten),
                    opened(arguments.json, stdout, append=arguments.resume) as file,
                ):
                    if file is not None:
                        write_jsonl(produced, file)
                for sentence in not_followed:
                    print(f"replay: {printable(sentence)}; the replay goes on", file=sys.stderr)
                for _ in produced:
                    pass
        except (KeyboardInterrupt, Exception) as error:
            ended_by = error
        in_order = sorted(latest(rows), key=lambda row: places[label_of(row, machines)])
        shown = in_order
        if ended_by is not None:
            shown = _of_complete_calls(in_order, every_stage, machines)
        if shown or ended_by is None:
            with noted(unwritten), opened(arguments.csv, stdout) as file:
                if file is not None:
                    write_csv(shown, file)
        if ended_by is None:
            with noted(unwritten), opened(arguments.benchmark_json, stdout) as file:
                if file is not None:
                    json.dump(plain(benchmark_entries(shown)), file, indent=1)
                    file.write("\n")
    if not_followed or [id(row) for row in in_order] != [id(row) for row in rows]:
        unwritten += _written_again(in_order, json_file, not_followed)
    # Calls whose kernels hung took as long as --timeout let them.
    paces = [] if any(row.status == "timeout" for row in rows) else [part.pace for part in parts]
    for pace in paces:
        if pace.is_reliable and pace.scale is not None:
            history.note(machines, pace.scale, pace.elapsed)
    is_kept = json_file is not None and json_file.is_file()
    resumed = arguments.json if is_kept else None
    said = _left_out(workloads, shown, machines, assigned, resumed)
    if isinstance(ended_by, KeyboardInterrupt):
        ended_by = KeyboardInterrupt(_interruption(said, rows, arguments))
    elif said and limit.seconds is not None:
        within = in_words(limit.seconds)
        print(f"replay: to end within {within}: {printable(said)}", file=sys.stderr)
    return Replayed(shown, unwritten, ended_by)


def without_variants(assigned: Assignment) -> Assignment | None:
    """The kernels that are no other's variants; None where all are, or none."""
    plain = {
        name: [kernel for kernel in kernels if not kernel.variant_of]
        for name, kernels in assigned.items()
    }
    return plain if plain != assigned and any(plain.values()) else None


def _resumed(
    path: Path,
    workloads: list[Workload],
    stages: Sequence[Assignment],
    machines: Sequence[Machine],
    settings: Settings,
) -> tuple[list[Row], list[list[Workload]]]:
    """The rows of a file that are complete at any stage, and the calls left at each."""
    rows: dict[str, list[Row]] = {}
    left: list[list[Workload]] = []
    for stage in stages:
        found, waiting = finished_rows(path, workloads, stage, machines, settings)
        of_stage: dict[str, list[Row]] = {}
        for row in found:
            of_stage.setdefault(label_of(row, machines), []).append(row)
        rows |= of_stage
        left.append(waiting)
    return [row for call in workloads for row in rows.get(call.label, [])], left


def _kept(count: int, left: int) -> str:
    """What a resumed file says of the calls that are not replayed again."""
    kept = "1 call is" if count == 1 else f"{count} calls are"
    return (
        f"{kept} kept as measured before, whatever {', '.join(NOT_COMPARED)} say now; {left} to go"
    )


def _measured(
    parts: Sequence[Part], settings: Settings, where: Execution, limit: TimeLimit, quiet: bool
) -> Generator[Row, None, None]:
    """The rows of all parts, as far as there is time."""
    with limit.watched():
        for part in parts:
            pace = part.pace

            def is_in_time(call: Workload, pace: Pace = pace) -> bool:
                return limit.allows(pace.expected[call.label] * (pace.proven_scale or 1.0))

            expected = [pace.expected[call.label] for call in part.calls]
            schedule = Schedule(part.calls, part.tiers, is_in_time, expected)
            with shown_progress(pace, quiet=quiet) as report:
                try:
                    yield from where.replay(schedule, part.assigned, settings, report)
                except Stopped:
                    return


def _written_again(rows: Sequence[Row], path: Path | None, not_followed: list[str]) -> list[str]:
    """Write rows that came in another order, or could not be written then; say why that fails.

    Args:
        path: of the JSON file; None without one.
        not_followed: why they could not be written as they came.
    """
    if path is None or not rows:
        return not_followed
    if path.exists() and not path.is_file():
        return not_followed  # a pipe or a device has what it took
    again: list[str] = []
    with noted(again):
        save_jsonl(rows, path)
    return again


def _of_complete_calls(
    rows: Sequence[Row], stages: Sequence[Assignment], machines: Sequence[Machine]
) -> list[Row]:
    """Those of calls that every kernel of a stage has a row of, or that cannot be read."""
    found: dict[str, set[tuple[str, str]]] = {}
    for row in rows:
        found.setdefault(label_of(row, machines), set()).add((row.environment, row.kernel))
    wanted = [
        {(name, kernel.name) for name, kernels in stage.items() for kernel in kernels}
        for stage in stages
    ]
    complete = {
        call
        for call, there in found.items()
        if any(each <= there for each in wanted) or any(not kernel for _, kernel in there)
    }
    return [row for row in rows if label_of(row, machines) in complete]


def _collected(produced: Iterator[Row], rows: list[Row]) -> Iterator[Row]:
    for row in produced:
        rows.append(row)
        if row.first_call_ms is not None:
            logger.info("first call of %s: %.1f ms", row.id, row.first_call_ms)
        yield row


def _announced(
    parts: Sequence[Part], machines: Sequence[Machine], limit: TimeLimit, scale: float | None
) -> str:
    """What will be replayed where, and how long that may take."""
    calls = len({call.name for part in parts for call in part.calls})
    kernels = parts[-1].kernels
    devices = parts[0].pace.at_a_time
    what = f"{counted(calls, 'call')} × {counted(kernels, 'kernel')}"
    several = f"{devices} × " if devices > 1 else ""
    types = " and ".join(machine.device for machine in machines)
    seconds = sum(part.seconds for part in parts)
    by = "a guess, as nothing was replayed here yet" if scale is None else "as the last replay here"
    said = f"{what} on {several}{types}: about {in_words(seconds)} ({by})"
    if not limit.allows(seconds):
        assert limit.seconds is not None
        said += f"; the most representative calls first, for {in_words(limit.seconds)}"
    return said


def _left_out(
    workloads: Sequence[Workload],
    rows: Sequence[Row],
    machines: Sequence[Machine],
    assigned: Assignment,
    file: str | None,
) -> str:
    """What there was no time for, and how to complete it; empty for nothing.

    Args:
        file: which `--resume` can complete; None if there is none.
    """
    measured: dict[tuple[str, str], set[str]] = {}
    for row in rows:
        key = label_of(row, machines), row.environment
        measured.setdefault(key, set()).add(row.kernel)
    begun = {label_of(row, machines) for row in rows}
    unreadable = {label_of(row, machines) for row in rows if not row.kernel}
    partly = {
        call
        for call in begun - unreadable
        for name, kernels in assigned.items()
        if {kernel.name for kernel in kernels} - measured.get((call, name), set())
    }
    missing = len(workloads) - len(begun)
    if not missing and not partly:
        return ""
    parts = [f"{missing} of {len(workloads)} calls left out"] if missing else []
    some = f"{counted(len(partly), 'call')} without some kernels"
    parts += [some] if partly else []
    how = "give --json FILE, so that --resume can complete it"
    if file is not None:
        how = f"the same command with --resume completes {file}"
    return f"{', '.join(parts)}; {how}"


def _interruption(left_out: str, rows: Sequence[Row], arguments: argparse.Namespace) -> str:
    """What an interrupted replay does not have, and how to complete it."""
    if not rows:
        files = [path for path in (arguments.json, arguments.csv) if path and os.path.isfile(path)]
        kept = f", and {' and '.join(files)} stayed as before" if files else ""
        return f"no call was replayed{kept}"
    options = [f"--{name.replace('_', '-')}" for name in OF_ALL_CALLS if getattr(arguments, name)]
    not_made = f"not made: {', '.join(options)}" if options else ""
    return "; ".join(filter(None, (not_made, left_out)))
