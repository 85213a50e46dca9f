"""Tables of the cost of recording, replaying, judging and launching."""

from __future__ import annotations

import itertools

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
    """List the share of a replay's time in which workers' rows are confirmed and judged."""
    lines = [
        "| machine | calls | rows | replay | blocks of calls | other judgements | load |",
        f"|---|{'---:|' * 6}",
    ]
    for row in results.read(results.DIRECTORY / "defence_overhead.csv"):
        wall_s = float(row["wall_s"])
        shares = [f"{float(row[name]) / wall_s:.0%}".replace("%", " %") for name in PARTS]
        threads = f", threads: {row['threads']}" if row["threads"] else ""
        machine = f"{row['device']}, torch {row['machine.torch']}{threads}"
        cells = [machine, row["calls"], row["rows"], f"{wall_s:.1f} s", *shares, row["load"]]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


PARTS = ("blocks_s", "judge_s")


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
