"""Tables of a replay. This module imports torch only when it is needed."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from capture.text.counted import counted
from capture.text.printable import printable

if TYPE_CHECKING:
    from replay.bench.settings import Settings
    from replay.rows.row import Machine, Row


def print_tables(
    rows: list[Row],
    machines: Sequence[Machine],
    settings: Settings,
    metrics: Sequence[str],
    *,
    details: bool = False,
    per_call: bool = False,
    versus_random: bool = False,
) -> None:
    """Print each type of device: its first screen, then its tables if they were requested.

    Several types of devices are compared too.

    Args:
        details: print the tables of each kind of call.
        per_call: print tables for each call instead of each kind of call.
    """
    from rich.console import Console

    from replay.comparison.device_types import across_devices
    from replay.comparison.row_matching import ComparisonError, Run
    from replay.report.call_tables import print_report
    from replay.report.device_tables import print_matrices
    from replay.report.matrix_table import print_first_screen
    from replay.report.versus_random import print_versus_random
    from replay.workloads.synthetic_counterparts import KINDS

    random = {weights for weights, _ in KINDS.values()} if versus_random else set()
    console = Console(highlight=False)
    for machine in machines:
        there = [row for row in rows if len(machines) == 1 or row.machine.device == machine.device]
        recorded = [row for row in there if row.call.weights not in random]
        print_first_screen(recorded, console, printable(_heading(there, machine, settings)))
        console.print()
        if details:
            print_report(
                there,
                console,
                metrics=metrics,
                errors_against=settings.errors_against,
                per_call=per_call,
                compare_stats=settings.compare_stats,
            )
        if versus_random:
            print_versus_random(there, console)
    if len(machines) > 1:
        try:
            merged = across_devices([Run("this replay", rows)])
        except ComparisonError as error:
            reason = printable(str(error))
            print(f"replay: no matrix of kernels and devices: {reason}", file=sys.stderr)
            return
        console.print()
        print_matrices(merged, console)


def _heading(rows: Sequence[Row], machine: Machine, settings: Settings) -> str:
    """Describe the machine and the settings of the replay."""
    versions = ", ".join(machine.versions)
    before = settings.calls_before
    lead = f" · {counted(before, 'call')} before each sample" if before else ""
    devices = len({row.ran_on for row in rows} - {""})
    several = f"{devices} × " if devices > 1 else ""
    return f"{several}{machine.device} · {versions} · {settings.cache} cache{lead}{_busy(rows)}"


def _busy(rows: Sequence[Row]) -> str:
    """Describe how busy the machine was; empty if it was not."""
    from replay.timing.interruptions import SHARE

    shares = [row.processor_share for row in rows if row.processor_share is not None]
    share = statistics.median(shares) if shares else 1.0
    if share < SHARE:
        return f" · busy machine: kernels waited for a processor {1 - share:.0%} of the time"
    times = [row.time_ms for row in rows if row.time_ms and row.time_ms.samples]
    late = [len(each.interrupted) / len(each.samples) for each in times]
    interrupted = statistics.median(late) if late else 0.0
    if interrupted > 1 - SHARE:
        return f" · busy machine: {interrupted:.0%} of the samples were interrupted"
    return ""
