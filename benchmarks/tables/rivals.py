"""Speed of other libraries' kernels relative to ours, in one run for each machine."""

from __future__ import annotations

from pathlib import Path

from benchmarks import results
from benchmarks.tables.markdown import machine_line, markdown_table
from benchmarks.tables.speed import shape

OURS = "triton-"
RIVALS = {
    "FlashAttention 2": ("torch-flash", "torch-varlen", "fa2"),
    "FlashAttention 3": ("fa3",),
    "FlashAttention 4": ("fa4",),
    "cuDNN": ("torch-cudnn", "cudnn"),
    "FlashInfer": ("flashinfer",),
    "FlashMLA": ("flash-mla",),
}
"""Beginnings of the names of each rival's kernels."""


def rivals(directory: Path = results.DIRECTORY, pattern: str = "rivals*.csv") -> str:
    """List, for each machine, each rival's time divided by ours; the fastest rival is in bold.

    Times are those of the core; a kernel without a core has its drop-in time. Of several kernels of
    a library, the fastest counts.
    """
    machines: dict[str, list[dict[str, str]]] = {}
    for file in sorted(directory.glob(pattern)):
        for row in results.read(file):
            if row["status"] == "ok":
                machines.setdefault(row["machine.device"], []).append(row)
    return "\n".join(map(_on_one_machine, machines.values()))


def _on_one_machine(rows: list[dict[str, str]]) -> str:
    calls: dict[str, list[dict[str, str]]] = {}
    for row in rows:
        calls.setdefault(f"{row['call.model']}, {row['call.name']}: {shape(row)}", []).append(row)
    found = {call: ratios for call, timed in calls.items() if (ratios := _ratios(timed))}
    if not found:
        return ""
    columns = [rival for rival in RIVALS if any(rival in ratios for ratios in found.values())]
    best = {call: min(ratios.values()) for call, ratios in found.items()}
    lines = {
        call: [_cell(ratios.get(rival), best[call]) for rival in columns]
        for call, ratios in found.items()
    }
    versions = dict.fromkeys(
        f"{rival} {row['version']}"
        for row in rows
        if not row["kernel"].startswith("torch-") and row["version"]
        for rival, names in RIVALS.items()
        if row["kernel"].startswith(names)
    )
    table = markdown_table(["rival's time / ours", *columns], lines)
    parts: dict[str, list[float]] = {}
    for call, ratio in best.items():
        parts.setdefault(call.partition(",")[0], []).append(ratio)
    ranges = ", ".join(f"{part} {min(own):.2f} to {max(own):.2f}" for part, own in parts.items())
    machine = ", ".join((machine_line(rows).strip(".\n"), *versions))
    return f"{table}\nTime of the fastest rival / ours: {ranges}. {machine}.\n"


def _ratios(rows: list[dict[str, str]]) -> dict[str, float]:
    """Return the times of the rivals that ran a call, relative to ours."""
    ours = _least_ms(rows, (OURS,))
    if ours is None:
        return {}
    times = {rival: _least_ms(rows, names) for rival, names in RIVALS.items()}
    return {rival: ms / ours for rival, ms in times.items() if ms is not None}


def _least_ms(rows: list[dict[str, str]], names: tuple[str, ...]) -> float | None:
    times = [
        float(row["core_time_ms.p50"] or row["time_ms.p50"])
        for row in rows
        if row["kernel"].startswith(names)
    ]
    return min(times, default=None)


def _cell(ratio: float | None, best: float) -> str:
    if ratio is None:
        return ""
    return f"**{ratio:.2f}**" if ratio == best else f"{ratio:.2f}"
