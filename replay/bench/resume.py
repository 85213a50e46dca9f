"""Continues an interrupted replay from the JSON Lines file that it was writing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from replay.bench.settings import Settings
from replay.bench.stages import NO_ENERGY
from replay.kernels.registry import Kernel
from replay.rows.row import HERE, Machine, Row
from replay.rows.row_files import RowsError, read_jsonl
from replay.timing.timer import TIMERS
from replay.workloads.workload import Workload


def finished_rows(
    path: Path,
    workloads: Sequence[Workload],
    assigned: Mapping[str, Sequence[Kernel]],
    machines: Sequence[Machine],
    settings: Settings,
) -> tuple[list[Row], list[Workload]]:
    """The rows of the calls that are complete in a file, and the calls that are not.

    A call is complete when every kernel has a row in every environment that it runs in; the others
    are replayed whole, because their speed-ups must be paired with a baseline of the same rounds.

    Args:
        assigned: the kernels to run, by environment.
        machines: where they will run, one for each type of device.
        settings: how they will be timed.

    Raises:
        RowsError: the file cannot be read, holds something other than rows, or rows of other
            calls than these, of another machine, or timed in another way.
    """
    rows: dict[str, list[Row]] = {}
    known = {workload.label: workload for workload in workloads}
    by_type = {machine.device: machine for machine in machines}
    for row in _read(path):
        label = label_of(row, machines)
        workload = known.get(label)
        if workload is None or (row.kernel and not workload.source.is_about(row.call)):
            raise RowsError(
                f"{path} has rows of another {row.call.name}: resume what it was written for, "
                "or name another file"
            )
        if unlike := _unlike(row, by_type.get(row.machine.device, machines[0]), settings):
            raise RowsError(
                f"{path} was measured with {unlike}: resume it as it was begun, or name another "
                "file"
            )
        rows.setdefault(label, []).append(row)
    wanted = {(name, kernel.name) for name, kernels in assigned.items() for kernel in kernels}
    complete = {name for name, members in rows.items() if _is_complete(members, wanted)}
    kept = [row for each in workloads if each.label in complete for row in rows[each.label]]
    return kept, [each for each in workloads if each.label not in complete]


def label_of(row: Row, machines: Sequence[Machine]) -> str:
    """The label of the workload that a row is about, of a replay on such machines."""
    return f"{row.call.name} on {row.machine.device}" if len(machines) > 1 else row.call.name


def latest(rows: Sequence[Row]) -> list[Row]:
    """Without those of calls that were replayed again later, in the same environment.

    Rows of one call, environment and type of device are of the same rounds, so they are replaced
    together: from the first kernel on that comes again, or where the call itself could not be
    replayed.
    """
    is_mixed = len({row.machine.device for row in rows} - {""}) > 1
    found: dict[tuple[str, str, str], dict[str, Row]] = {}
    for row in rows:
        device = row.machine.device if is_mixed else ""
        members = found.setdefault((row.call.name, row.environment, device), {})
        if row.kernel in members or "" in members or not row.kernel:
            members.clear()
        members[row.kernel] = row
    kept = {id(row) for members in found.values() for row in members.values()}
    return [row for row in rows if id(row) in kept]


def _is_complete(rows: list[Row], wanted: set[tuple[str, str]]) -> bool:
    """Whether every kernel that was wanted has a row, and so has what it is compared with."""
    partners = {(row.environment, row.speedup.vs) for row in rows if row.speedup}
    return wanted | partners <= {(row.environment, row.kernel) for row in rows}


def _read(path: Path) -> list[Row]:
    """The rows of a file; where its last line was cut off, without those of its last call."""
    try:
        rows, is_cut_off = read_jsonl(path)
    except FileNotFoundError:
        return []
    cut = {row.call.name for row in rows[-1:] if is_cut_off}
    return latest([row for row in rows if row.call.name not in cut])


def _unlike(row: Row, machine: Machine, settings: Settings) -> str:
    """What was different when a row was measured; empty for nothing.

    Versions in another environment than this are its own.
    """
    there: dict[str, object] = asdict(row.machine)
    here: dict[str, object] = asdict(machine)
    if row.machine.cuda:  # a GPU waits for one of them; --gpus shares them out
        there = {name: value for name, value in there.items() if name != "usable_cpus"}
    if row.environment != HERE:
        there = {"device": row.machine.device}
    if not row.machine.device:  # its worker died before it could say
        there = {}
    if row.accuracy is not None:
        there |= {"--tolerances": row.tolerances}
        here |= {"--tolerances": settings.tolerances.changes()}
    if row.time_ms is not None:
        there |= {"--cache": row.cache, "--calls-before": row.calls_before}
        here |= {"--cache": settings.cache, "--calls-before": settings.calls_before}
        there |= {"timer": row.timer}
        here |= {"timer": TIMERS[settings.device.type, settings.cache]}
        there |= {"--metric energy": "on" if _was_energy_wanted(row) else "off"}
        here |= {"--metric energy": "on" if settings.energy else "off"}
    for name, value in there.items():
        if value != here[name]:
            return f"{name} {_said(value)} (now {_said(here[name])})"
    return ""


def _was_energy_wanted(row: Row) -> bool:
    return row.energy is not None or any(flag.startswith(NO_ENERGY) for flag in row.flags)


def _said(value: object) -> str:
    return "none" if value in ("", None) else str(value)
