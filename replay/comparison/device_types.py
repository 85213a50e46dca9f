"""Runs of the same calls on several types of device, merged: which kernel on which?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from replay.comparison.row_matching import ComparisonError, Run, check_settings, match
from replay.rows.row import Row


@dataclass(frozen=True)
class AcrossDevices:
    """The rows of each type of device, on the calls that all of them replayed."""

    rows: dict[str, list[Row]]
    """By the device's name, in the order of the runs."""
    left_out: int
    """Calls that some device did not replay."""


def across_devices(runs: Sequence[Run]) -> AcrossDevices:
    """Merge runs; one may hold rows of several devices, and a device's rows be in several runs.

    Raises:
        ComparisonError: there is one device only, it has two rows of a kernel on a call, there is
            no call in common, or the devices were measured in different ways.
    """
    by_device: dict[str, list[Row]] = {}
    for run in runs:
        for row in run.rows:
            if device := _device_of(row, run):
                by_device.setdefault(device, []).append(row)
    if len(by_device) < 2:
        only = next(iter(by_device), "no device that is named")
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
    """Where a row was measured; of one that was not, its run's device, if that has one."""
    if row.machine.device or len(run.devices) != 1:
        return row.machine.device
    return run.devices[0]


def _call(row: Row) -> object:
    """What a row's call is on any machine."""
    return replace(row.call, backend="")
