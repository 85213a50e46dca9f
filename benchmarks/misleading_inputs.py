"""Measures how far random inputs mislead about speed, error and power.

    python -m benchmarks.misleading_inputs                full size, with random weights (one GPU)
    python -m benchmarks.misleading_inputs --size tiny    the trained built-in models, also on a CPU

Captures a few calls of each model and replays these calls with `--versus-random --metric all`,
compared with standard normal values and with values of each channel's recorded mean and deviation.
Puts the lines of this machine and size into `benchmarks/results/misleading_inputs.csv`.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks import results
from benchmarks.full_size import run
from replay.report.versus_random import FIGURES, counterparts
from replay.rows.row import Row
from replay.rows.row_files import read_jsonl
from replay.workloads.synthetic_counterparts import KINDS

MODELS = {  # the weights, and what is recorded: one call of each phase, or a few
    "full": (
        "random",
        {
            "cogvideo": "--steps 1 --max 1",
            "flux": "--steps 1 --max 1",
            "llama": "--steps 2 --max 2",
        },
    ),
    "tiny": ("pretrained", {"cogvideo": "--max 3", "flux": "--max 3", "llama": "--max 6"}),
}
KERNELS = {
    "cuda": "torch-default,torch-cudnn,?age1,triton-fa3,triton-fp8,triton-sage,triton-decode",
    "cpu": "torch-default,benchmarks/emulated_8_bit.py:int8,benchmarks/emulated_8_bit.py:fp8",
}
MACHINE = ("device", "torch", "cuda", "triton")
VALUES = ("recorded", *KINDS)
COLUMNS = (
    *("size", "model", "phase", "title", "weights", "kernel", "calls"),
    *(f"{figure}.{values}" for figure in FIGURES for values in VALUES),
    *(f"machine.{name}" for name in MACHINE),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--size", choices=MODELS, default="full")
    parser.add_argument("--kernels", help="kernels (default: those in the docs)")
    parser.add_argument("--out", type=Path, default=results.DIRECTORY / "misleading_inputs.csv")
    arguments = parser.parse_args()
    weights, recorded = MODELS[arguments.size]
    kernels = arguments.kernels or KERNELS["cuda" if torch.cuda.is_available() else "cpu"]
    with tempfile.TemporaryDirectory() as scratch:
        captured, file = f"{scratch}/captured", Path(scratch) / "rows.jsonl"
        for model, most in recorded.items():
            run(
                f"capture --model {model} --size {arguments.size} --weights {weights} {most} "
                f"--out {captured}"
            )
        run(
            f"replay --dir {captured} --versus-random --metric all --json {file} "
            f"--kernels {kernels} --max-seconds 0.3"
        )
        lines = [*summary(read_jsonl(file).rows, arguments.size)]
    results.write_lines(_with_others(lines, arguments.out), COLUMNS, arguments.out)


def summary(rows: list[Row], size: str) -> Iterator[dict[str, Any]]:
    """Yield a line for each kernel on each kind of call: medians over the calls."""
    for group, kernels in counterparts(rows):
        machine = asdict(group.rows[kernels[0].kernel][0].machine)
        first = group.calls[0]
        for each in kernels:
            yield {
                "size": size,
                "model": first.model,
                "phase": first.phase,
                "title": group.title,
                "weights": group.weights,
                "kernel": str(each.kernel),
                "calls": each.calls,
                **{
                    f"{figure}.{values}": each.figures[values][figure]
                    for figure in FIGURES
                    for values in VALUES
                },
                **{f"machine.{name}": machine[name] for name in MACHINE},
            }


def _with_others(lines: list[dict[str, Any]], path: Path) -> list[dict[str, Any]]:
    """Append the file's lines of other machines or sizes."""

    def place(line: dict[str, Any]) -> tuple[str, str]:
        return line["size"], line["machine.device"]

    measured = {place(line) for line in lines}
    before = results.read(path) if path.exists() else []
    return [*lines, *(line for line in before if place(line) not in measured)]


if __name__ == "__main__":
    main()
