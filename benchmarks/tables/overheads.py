"""Tables of the cost of recording, replaying, judging and launching."""

from __future__ import annotations

import itertools
from collections import defaultdict

from benchmarks import results
from benchmarks.tables.markdown import machine_line, markdown_table


def by_figure(file: str) -> str:
    """List the costs of recording or replaying, by figure; each workload has its own table."""
    return "\n".join(
        _of_workload(workload, list(rows))
        for workload, rows in itertools.groupby(
            results.read(results.DIRECTORY / file),
            key=lambda row: f"{row['model']}, {row['weights']}; {row['machine.device']}",
        )
    )


def _of_workload(workload: str, rows: list[dict[str, str]]) -> str:
    lines = ["| figure | median | runs |", "|---|---:|---:|"]
    for row in rows:
        value = f"{float(row['p50']):.4g}"
        unit = f" {row['unit']}" if row["unit"] not in ("", "×") else row["unit"]
        lines.append(f"| {row['figure']} | {value}{unit} | {row['n']} |")
    return "\n".join(lines) + f"\n\n{workload}, torch {rows[0]['machine.torch']}.\n"


def defence_overhead() -> str:
    """List the overhead of judging timed calls in a replay, and of the judge's process alone."""
    rows = results.read(results.DIRECTORY / "defence_overhead.csv")
    arms: dict[tuple[str, ...], dict[str, dict[str, str]]] = defaultdict(dict)
    for row in rows:
        names = ("device", "machine.torch", "threads", "calls", "rows", "load")
        key = tuple(row[name] for name in names)
        arms[key][row["arm"]] = row
    lines = [
        "| machine | calls | rows | without, wall | without, CPU | all of it, wall | CPU "
        "| the judge's process alone, wall | CPU | load |",
        f"|---|{'---:|' * 9}",
    ]
    for (device, torch, threads, calls, count, load), found in arms.items():
        without = [f"{float(found['without'][name]):.1f} s" for name in ("wall_s", "cpu_s")]
        added = [
            f"{float(found[arm][name]):+.0%}".replace("%", " %")
            for arm in ("as it is", "without, and a judge")
            for name in ("wall", "cpu")
        ]
        machine = f"{device}, torch {torch}" + (f", threads: {threads}" if threads else "")
        cells = [machine, calls, count, *without, *added, load]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def launch_cost() -> str:
    """List the host time of each kernel, by call."""
    rows = results.read(results.DIRECTORY / "launch_cost.csv")
    calls = list(dict.fromkeys(row["call"] for row in rows))
    lines: dict[str, list[str]] = {}
    for row in rows:
        name = row["kernel"] + " core" * (row["part"] == "core")
        alone, among = (float(row[f"{how}, µs"]) for how in ("back to back", "among other work"))
        lines.setdefault(name, [""] * len(calls))[calls.index(row["call"])] = (
            f"{alone:.0f}, {among:.0f}"
        )
    return markdown_table(["µs: back to back, among other work", *calls], lines) + machine_line(
        rows
    )
