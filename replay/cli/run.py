"""The replay itself: how long it will take, what comes first, and where its rows go."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from capture.counted import counted
from capture.printable import printable
from replay.bench.resume import finished_rows, label_of, latest
from replay.bench.settings import Settings
from replay.cli.files import opened
from replay.cli.kernels import able_kernels
from replay.cli.progress import Pace, shown_progress
from replay.cli.stdout import reserved_stdout
from replay.cli.time_limit import TimeLimit, in_words
from replay.distribution.estimate import History, Rates, expected_seconds, together
from replay.report.benchmark_json import benchmark_entries
from replay.rows.files import save_jsonl, write_csv, write_jsonl
from replay.rows.row import Machine, Row
from replay.workers.execution import Assignment, Execution
from replay.workers.process import Stopped
from replay.workloads.recorded import Workload
from replay.workloads.representative import tiers
from replay.workloads.schedule import Schedule

logger = logging.getLogger(__name__)

LONG_SECONDS = 30.0
"""What takes less is not announced: it is done before one has decided to wait."""

NOT_COMPARED = ("--rounds", "--max-seconds", "--max-noise", "--seed", "--resources")
"""What rows do not say they were measured with, so that `--resume` cannot see it change."""


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
) -> list[Row]:
    """Replay the calls, or what is left of them, and write rows as the arguments say.

    JSON is written call by call, so that an interrupted run keeps what it measured.

    Returns the rows in the order of the calls, those of a resumed file included.
    """
    machines, history = where.machines(settings.device), History()
    told = {}
    if limit.seconds is not None:
        told = dict(zip((call.name for call in workloads), tiers(workloads), strict=True))
    if len(machines) > 1:
        workloads = [replace(call, on=each.device) for each in machines for call in workloads]
    places = {workload.label: place for place, workload in enumerate(workloads)}
    stages = [assigned]
    if (plain := without_variants(assigned)) is not None:
        stages.insert(0, plain)
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
    with (
        reserved_stdout() as stdout,
        opened(arguments.json, stdout, append=arguments.resume) as json_file,
        opened(arguments.csv, stdout) as csv_file,
        opened(arguments.benchmark_json, stdout) as benchmark_file,
    ):
        is_long = limit.seconds is not None or sum(part.seconds for part in parts) >= LONG_SECONDS
        if parts and is_long and not arguments.quiet:
            print(f"replay: {_announced(parts, machines, limit, scale)}", file=sys.stderr)
        produced = _collected(_measured(parts, settings, where, limit, arguments.quiet), rows)
        if json_file is not None:
            write_jsonl(produced, json_file)
        for _ in produced:
            pass
        in_order = sorted(latest(rows), key=lambda row: places[label_of(row, machines)])
        if csv_file is not None:
            write_csv(in_order, csv_file)
        if benchmark_file is not None:
            json.dump(benchmark_entries(in_order), benchmark_file, indent=1)
            benchmark_file.write("\n")
    is_written = [id(row) for row in in_order] == [id(row) for row in rows]
    if not is_written and arguments.json not in (None, "-"):
        save_jsonl(in_order, Path(arguments.json))
    # Calls whose kernels hung took as long as --timeout let them.
    paces = [] if any(row.status == "timeout" for row in rows) else [part.pace for part in parts]
    for pace in paces:
        if pace.is_reliable and pace.scale is not None:
            history.note(machines, pace.scale, pace.elapsed)
    if said := _left_out(workloads, in_order, machines, assigned, limit, arguments):
        print(f"replay: {printable(said)}", file=sys.stderr)
    return in_order


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
) -> Iterator[Row]:
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
    limit: TimeLimit,
    arguments: argparse.Namespace,
) -> str:
    """What there was no time for, and how to complete it; empty for nothing."""
    if limit.seconds is None:
        return ""
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
    how = f"the same command with --resume completes {arguments.json}"
    if arguments.json in (None, "-"):
        how = "give --json FILE, so that --resume can complete it"
    return f"to end within {in_words(limit.seconds)}: {', '.join(parts)}; {how}"
