"""Result files: the rows of a replay, reduced to the columns that tables and readers need."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from replay.rows.fields import leaf

DIRECTORY = Path(__file__).parent / "results"

SIZES = ("batch", "q_heads", "kv_heads", "q_len", "kv_len", "head_dim", "v_head_dim")

COLUMNS = (
    "kernel",
    "version",
    "environment",
    "call.name",
    "call.model",
    "call.phase",
    "call.module",
    "call.step",
    *(f"call.shape.{size}" for size in SIZES),
    "call.dtype",
    "call.is_causal",
    "call.weights",
    "status",
    "reason",
    "flags",
    "time_ms.p10",
    "time_ms.p50",
    "time_ms.p90",
    "time_ms.n",
    "core_time_ms.p50",
    "first_call_ms",
    "host_ms",
    "tflops",
    "gb_per_s",
    "speedup.vs",
    "speedup.ratio",
    "speedup.low",
    "speedup.high",
    "speedup.verdict",
    "speedup.reason",
    "accuracy.reference.cosine",
    "accuracy.reference.relative_l1",
    "accuracy.reference.max_abs",
    "accuracy.reference.row_cosine_min",
    "accuracy.noise_floor.relative_l1",
    "peak_bytes",
    "gpu_during.sm_clock_mhz",
    "gpu_during.power_w",
    "machine.device",
    "machine.torch",
    "machine.cuda",
    "machine.cudnn",
    "machine.triton",
)


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """Read the rows of a `replay --json` file."""
    with path.open() as file:
        for line in file:
            yield json.loads(line)


def write(rows: Iterable[dict[str, Any]], path: Path) -> None:
    """Write rows as CSV with `COLUMNS`, floats to six digits."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for row in rows:
            writer.writerow(cell(leaf(row, column)) for column in COLUMNS)


def write_lines(lines: Iterable[Mapping[str, Any]], columns: Sequence[str], path: Path) -> None:
    """Write lines as CSV with the given columns, floats to six digits; missing values are empty.

    Raises:
        ValueError: a line has a key without a column.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n", restval="")
        writer.writeheader()
        for line in lines:
            writer.writerow({name: cell(value) for name, value in line.items()})


def read(path: Path) -> list[dict[str, str]]:
    """Read the rows of a result file, by column."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def cell(value: Any) -> str:
    """Format a value for a result file."""
    if value is None:
        return ""
    if isinstance(value, list):
        return "; ".join(map(str, value))
    return f"{value:.6g}" if isinstance(value, float) else str(value)
