"""Tables of repeated trials and how often each succeeded."""

from __future__ import annotations

import csv

from benchmarks import results
from benchmarks.tables.markdown import machine_line, markdown_table


def coverage() -> str:
    """List how often the verdicts of speed are right, by number of rounds."""
    rows = results.read(results.DIRECTORY / "coverage.csv")
    headings = ["machine", "rounds", "pairs", "A/A tied", "3 % more work found"]
    lines = [f"| {' | '.join(headings)} |", f"|---|{'---:|' * (len(headings) - 1)}"]
    for row in rows:
        machine = f"{row['device']}, torch {row['machine.torch']}"
        if row["threads"]:
            threads = "one thread" if row["threads"] == "1" else f"{row['threads']} threads"
            machine += f", {threads}, load average {row['load']}"
        shares = [
            f"{100 * float(row[f'{name}.share']):.1f} % ({100 * float(row[f'{name}.low']):.1f}-"
            f"{100 * float(row[f'{name}.high']):.1f})"
            for name in ("ties", "found")
        ]
        rounds = f"{row['rounds']}, by `{row['stop']}`" if row["stop"] else row["rounds"]
        lines.append(f"| {machine} | {rounds} | {row['pairs']} | {' | '.join(shares)} |")
    return "\n".join(lines) + "\n"


def busy_machine() -> str:
    """List verdicts of speed between two processes, on a quiet and on a busy machine."""
    columns = {
        "calls": "calls",
        "errors": "errors",
        "A/A not told apart": "again_not_told_apart",
        "2× found": "twice_found",
        "inconclusive": "twice_inconclusive",
        "wrong": "twice_wrong",
    }
    lines = [f"| machine | {' | '.join(columns)} |", f"|---|{'---:|' * len(columns)}"]
    for row in results.read(results.DIRECTORY / "busy_machine.csv"):
        machine = f"{row['device']}, torch {row['machine.torch']}, threads: {row['threads']}"
        machine += f", busy loops: {row['loops']}"
        lines.append(f"| {machine} | {' | '.join(row[name] for name in columns.values())} |")
    return "\n".join(lines) + "\n"


def doctor_score() -> str:
    """List, by cause, how many planted faults `replay doctor` named right, and its false alarms."""
    rows = results.read(results.DIRECTORY / "doctor_score.csv")
    *causes, healthy = rows
    lines = {
        row["cause"]: [
            row["planted"],
            *(row[f"{part}.right"] for part in ("cause", "layer")),
            *(
                f"{row[f'{part}.right']} of {row[f'{part}s']}" if row[f"{part}s"] != "0" else ""
                for part in ("step", "head")
            ),
        ]
        for row in causes
    }
    planted, right = (sum(int(row[name]) for row in causes) for name in ("planted", "right"))
    summary = (
        f"\nCause and layer are right in {right} of {planted}; "
        f"{healthy['findings']} findings in {healthy['calls']} calls of kernels without a fault.\n"
    )
    headings = [
        "planted fault",
        "planted",
        "cause right",
        "layer right",
        "step right",
        "head right",
    ]
    machine = f"\n{healthy['machine.device']}, torch {healthy['machine.torch']}.\n"
    return markdown_table(headings, lines) + summary + machine


def capture_faults() -> str:
    """List what happened after each fault while recording, and how often it was tried."""
    with (results.DIRECTORY / "capture_faults.csv").open(newline="") as file:
        lines = {row["fault"]: [row["tried"], row["outcome"]] for row in csv.DictReader(file)}
    return markdown_table(["fault", "tried", "what happened"], lines)


def public_tests() -> str:
    """List the number of comparisons in other libraries' tests that each kernel passed."""
    path = results.DIRECTORY / "public_tests.csv"
    if not path.is_file():
        return ""
    rows = results.read(path)
    columns = ("FlashAttention 2", "FlashAttention 3", "FlashInfer", "FlashInfer, with itself")
    lines: dict[str, list[str]] = {}
    for kernel in dict.fromkeys(row["kernel"] for row in rows):
        own = [row for row in rows if row["kernel"] == kernel]
        by_column = [[row for row in own if _tests_of(row) == name] for name in columns]
        passed, failed = (
            [sum(int(row[result]) for row in some) for some in by_column]
            for result in ("passed", "failed")
        )
        skipped = sum(int(row["skipped"]) for row in own)
        lines[f"`{kernel}`"] = [
            *(f"{n} of {n + m}" if n + m else "" for n, m in zip(passed, failed, strict=True)),
            str(skipped),
        ]
    versions = ", ".join(
        f"{library} {version}"
        for library, version in dict.fromkeys((row["library"], row["version"]) for row in rows)
    )
    table = markdown_table(["passed", *columns, "skipped"], lines)
    return f"{table}{machine_line(rows)[:-2]}; {versions}.\n"


def _tests_of(row: dict[str, str]) -> str:
    if row["library"] == "flash-attention":
        return f"FlashAttention {3 if row['file'].startswith('hopper/') else 2}"
    return "FlashInfer, with itself" if row["against"] == "itself" else "FlashInfer"


def accumulation() -> str:
    """List errors by kernel and mean of the values, and by the number of keys."""
    rows = results.read(results.DIRECTORY / "accumulation.csv")
    lengths = list(dict.fromkeys(row["keys"] for row in rows))
    lines: dict[str, list[str]] = {}
    for row in rows:
        name = f"`{row['kernel']}`, mean {row['mean of the values']}"
        error = f"{100 * float(row['relative L1']):.2f}"
        lines.setdefault(name, [""] * len(lengths))[lengths.index(row["keys"])] = error
    headings = [f"{int(length) // 1024}K" for length in lengths]
    return markdown_table(["relative L1, %", *headings], lines) + machine_line(rows)


def other_gpus() -> str:
    """List, by kernel and compute capability, the head dimensions that a kernel compiles for."""
    rows = results.read(results.DIRECTORY / "other_gpus.csv")
    capabilities = list(dict.fromkeys(row["compute capability"] for row in rows))
    lines: dict[str, list[str]] = {}
    for kernel in dict.fromkeys(row["kernel"] for row in rows):
        lines[f"`{kernel}`"] = [
            ", ".join(
                row["head_dim"]
                for row in rows
                if (row["kernel"], row["compute capability"], row["result"])
                == (kernel, capability, "compiles")
            )
            for capability in capabilities
        ]
    return markdown_table(["kernel", *capabilities], lines) + f"\nTriton {rows[0]['triton']}.\n"
