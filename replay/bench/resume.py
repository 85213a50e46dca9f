"""The continuation of an interrupted replay from the JSON Lines file that it was writing."""

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
    """Return the rows of the complete calls in a file, and the incomplete calls.

    A call is complete when every kernel has a row in every environment where the kernel runs. An
    incomplete call is replayed with all kernels, because a speed-up needs a baseline that was timed
    in the same rounds.

    Args:
        assigned: the kernels to run, keyed by environment.
        machines: the machines to run on, one for each type of device.
        settings: the settings to measure with.

    Raises:
        RowsError: the file cannot be read, contains anything other than rows, or contains rows of
            other calls, another machine or other settings.
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
    finished = [call.label for call in workloads if call.label in complete]
    unfinished = [call for call in workloads if call.label not in complete]
    return [row for label in finished for row in rows[label]], unfinished


def label_of(row: Row, machines: Sequence[Machine]) -> str:
    """Return the label of a row's workload in a replay on these machines."""
    return f"{row.call.name} on {row.machine.device}" if len(machines) > 1 else row.call.name


def latest(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of the latest replay of each call.

    Rows of one call, environment and type of device share their rounds and are replaced together.
    A new replay begins where a kernel appears again, or where the call could not be replayed.
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
    partners = {(row.environment, row.speedup.vs) for row in rows if row.speedup}
    return wanted | partners <= {(row.environment, row.kernel) for row in rows}


def _read(path: Path) -> list[Row]:
    """Read the rows of a file, without its last call if the last line was cut off."""
    try:
        rows, is_cut_off = read_jsonl(path)
    except FileNotFoundError:
        return []
    cut = {row.call.name for row in rows[-1:] if is_cut_off}
    return latest([row for row in rows if row.call.name not in cut])


def _unlike(row: Row, machine: Machine, settings: Settings) -> str:
    """Return the first difference between a row's conditions and this replay's; empty if none.

    Versions in other environments may differ.
    """
    measured: dict[str, object] = asdict(row.machine)
    expected: dict[str, object] = asdict(machine)
    if row.machine.cuda:  # one CPU is enough for a GPU; --gpus divides the CPUs
        measured = {name: value for name, value in measured.items() if name != "usable_cpus"}
    if row.environment != HERE:
        measured = {"device": row.machine.device}
    if not row.machine.device:  # the worker died before it reported its machine
        measured = {}
    if row.accuracy is not None:
        measured |= {"--tolerances": row.tolerances}
        expected |= {"--tolerances": settings.tolerances.changes()}
    if row.call.dtype:  # the call was loaded
        measured |= {"--backward": "on" if row.call.grad_output else "off"}
        expected |= {"--backward": "on" if settings.backward else "off"}
    if row.time_ms is not None:
        measured |= {"--cache": row.cache, "--calls-before": row.calls_before}
        expected |= {"--cache": settings.cache, "--calls-before": settings.calls_before}
        measured |= {"timer": row.timer}
        expected |= {"timer": TIMERS[settings.device.type, settings.cache]}
        measured |= {"--metric energy": "on" if _was_energy_wanted(row) else "off"}
        expected |= {"--metric energy": "on" if settings.energy else "off"}
    for name, value in measured.items():
        if value != expected[name]:
            return f"{name} {_or_none(value)} (now {_or_none(expected[name])})"
    return ""


def _was_energy_wanted(row: Row) -> bool:
    return row.energy is not None or any(flag.startswith(NO_ENERGY) for flag in row.flags)


def _or_none(value: object) -> str:
    return "none" if value in ("", None) else str(value)
