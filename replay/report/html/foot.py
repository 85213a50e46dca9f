"""Foot of the page: date, command, versions, and the load of the machine."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from dataclasses import fields
from datetime import datetime, timezone

from attention_replay import __version__
from capture.text.counted import counted
from capture.text.printable import printable
from replay.rows.row import Row
from replay.timing.statistics import percentile


def foot(rows: Sequence[Row], command: str) -> Iterator[str]:
    """Yield paragraphs for the foot of the page.

    Args:
        command: command that writes the page; empty if a program writes it.
    """
    written = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    by = f" by <code>{html.escape(printable(command))}</code>" if command else ""
    yield f"<p>Written {written}{by}, attention-replay {html.escape(__version__)}.</p>"
    for machine in dict.fromkeys(row.machine for row in rows if row.machine.device):
        parts = [
            f"{each.name.replace('_', ' ')} {value}"
            for each in fields(machine)
            if (value := getattr(machine, each.name))
        ]
        yield f"<p>{html.escape(printable(' · '.join(parts)))}</p>"
    if load := " · ".join(_load(rows)):
        yield f"<p>Load: {html.escape(load)}.</p>"
    yield "<p>The file needs no network.</p>"


def _load(rows: Sequence[Row]) -> Iterator[str]:
    """Yield what other programs took from the measurement, as far as the rows know it."""
    shares = [row.processor_share for row in rows if row.processor_share is not None]
    if shares:
        yield (
            f"the kernels had a processor {percentile(shares, 50):.0%} of the time (median of the "
            f"rows; least {min(shares):.0%})"
        )
    clocks = [
        row.gpu_during.sm_clock_mhz
        for row in rows
        if row.gpu_during is not None and row.gpu_during.sm_clock_mhz is not None
    ]
    if clocks:
        yield f"SM clock {min(clocks)} to {max(clocks)} MHz"
    timed = [row.time_ms for row in rows if row.time_ms is not None]
    interrupted = sum(bool(time.interrupted) for time in timed)
    yield f"{interrupted} of {counted(len(timed), 'timed row')} interrupted by other programs"
