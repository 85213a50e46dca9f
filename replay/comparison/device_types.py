"""Runs of the same calls on several types of device, merged into one table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from replay.comparison.row_matching import ComparisonError, Run, check_settings, match
from replay.rows.row import Row


@dataclass(frozen=True)
class AcrossDevices:
    """Rows of each type of device, for the calls that every one of the devices replayed."""

    rows: dict[str, list[Row]]
    """Rows by device name, in the order of the runs."""
    left_out: int
    """Number of calls that at least one device did not replay."""


def across_devices(runs: Sequence[Run]) -> AcrossDevices:
    """Merge runs. A run may hold rows from several devices, and a device may have several runs.

    Raises:
        ComparisonError: there is only one device, a device has two rows of a kernel on a call, the
        devices share no call, or their runs were timed in different ways.
    """
    by_device: dict[str, list[Row]] = {}
    for run in runs:
        for row in run.rows:
            if device := _device_of(row, run):
                by_device.setdefault(device, []).append(row)
    if len(by_device) < 2:
        only = next(iter(by_device), "an unnamed device")
        raise ComparisonError(
            f"all rows are of {only}: name the rows of another type of device too"
        )
    merged = [Run(device, rows) for device, rows in by_device.items()]
    first, *others = merged
    for other in others:
        check_settings(match(first, other).pairs, first, other)
    calls = [{_call(row) for row in run.rows if row.kernel} for run in merged]
    common = set.intersection(*calls)
    return AcrossDevices(
        {run.name: [row for row in run.rows if _call(row) in common] for run in merged},
        len(set.union(*calls) - common),
    )


def _device_of(row: Row, run: Run) -> str:
    """Return a row's device; if the row names none, return the only device of the row's run."""
    if row.machine.device or len(run.devices) != 1:
        return row.machine.device
    return run.devices[0]


def _call(row: Row) -> object:
    """Return a value that identifies a row's call across machines."""
    return replace(row.call, backend="")
