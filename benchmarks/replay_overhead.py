"""Measures the cost of a replay beyond the kernels' time.

    python -m benchmarks.replay_overhead                         calls made here, on the CPU
    python -m benchmarks.replay_overhead --dir captured_inputs --device cuda

Replays a recording with the command (`benchmarks.marked_replay`), and compares the total time with
the timed rounds and their warm-up. On a GPU, this is repeated with `--metric all`, which also times
blocks of calls for their energy.
Replaces the measured figures in `benchmarks/results/replay_overhead.csv`, one line each.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import results
from benchmarks.capture_overhead import COLUMNS, MACHINE, Figures
from benchmarks.defence_overhead import KERNELS
from benchmarks.gpu import measured_on
from capture import load, record
from replay.bench.reported_stages import TIMING


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--dir", type=Path, help="recording (default: random calls)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--kernels", help="kernels, as for `replay` (default: kernels without extra packages)"
    )
    parser.add_argument(
        "--metric",
        choices=("all",),
        help="replay only with this metric (default on a GPU: with and without)",
    )
    parser.add_argument("--out", type=Path, default=results.DIRECTORY / "replay_overhead.csv")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    if arguments.metric and device.type != "cuda":
        parser.error("--metric all measures energy, for which it needs --device cuda")
    with tempfile.TemporaryDirectory() as scratch:
        directory = arguments.dir or made_here(Path(scratch))
        capture = load(directory).captures[0]
        figures = Figures(capture.model, capture.weights, measured_on(device, MACHINE))
        kernels = arguments.kernels or KERNELS[device.type]
        if arguments.metric is None:
            whole(directory, kernels, device, figures, with_energy=False)
        if device.type == "cuda":
            whole(directory, kernels, device, figures, with_energy=True)
    measured = {line["figure"] for line in figures.lines}
    written = results.read(arguments.out) if arguments.out.exists() else []
    others = [line for line in written if line["figure"] not in measured]
    results.write_lines([*others, *figures.lines], COLUMNS, arguments.out)


class Attention(nn.Module):
    """One call of random values; only the size matters."""

    def forward(self) -> Tensor:
        query, key, value = torch.randn(3, 1, 8, 4096, 128).unbind()
        return F.scaled_dot_product_attention(query, key, value)


def made_here(scratch: Path) -> Path:
    """Record four calls of random values."""
    attention = Attention()
    with torch.no_grad(), record(attention, scratch / "recorded", max=4, weights="random"):
        for _ in range(4):
            attention()
    return scratch / "recorded"


def whole(
    directory: Path, kernels: str, device: torch.device, figures: Figures, *, with_energy: bool
) -> None:
    """Time the whole command, and the work that it times."""
    name = "replay --metric all" if with_energy else "replay"
    with tempfile.TemporaryDirectory() as scratch:
        said, json_file = Path(scratch) / "marks.json", Path(scratch) / "rows.jsonl"
        command = [sys.executable, "-m", "benchmarks.marked_replay", str(said)]
        command += ["--dir", str(directory), "--device", str(device)]
        command += [] if kernels == "default" else ["--kernels", kernels]
        command += ["--metric", "all"] if with_energy else []
        begin = time.perf_counter()
        subprocess.run([*command, "--json", str(json_file)], check=True, stdout=subprocess.DEVNULL)
        seconds = time.perf_counter() - begin
        marks = json.loads(said.read_text())
        rows = list(results.read_jsonl(json_file))
    own = timed_seconds(marks, rows)
    figures.add(f"{name}: calls", "", [float(len({row["call"]["name"] for row in rows}))])
    figures.add(f"{name}: the command", "s", [seconds])
    figures.add(f"{name}: timed work and warm-up", "s", [own])
    figures.add(f"{name}: the command / timed work and warm-up", "×", [seconds / own])
    # Compiling, and a library's set-up in its first call, count as kernel time.
    own += sum(row["first_call_ms"] or 0.0 for row in rows) / 1e3
    figures.add(f"{name}: the command / first calls, timed work and warm-up", "×", [seconds / own])


def timed_seconds(marks: list[tuple[float, str, str]], rows: list[dict[str, Any]]) -> float:
    """Return the seconds of timed rounds, their warm-up, and blocks of calls for their energy.

    After these, each timed kernel of a call has one more report, for checking what was timed.

    Args:
        marks: time, call and stage of each report; the last report has neither call nor stage.
    """
    seconds = 0.0
    of_calls = [list(each) for _, each in itertools.groupby(marks, key=lambda mark: mark[1])]
    for seen, after in itertools.pairwise(of_calls):
        stages = [stage for _, _, stage in seen]
        if TIMING in stages:
            timed = sum(row["call"]["name"] == seen[0][1] and bool(row["time_ms"]) for row in rows)
            end = [*seen, after[0]][len(seen) - timed]
            seconds += end[0] - seen[stages.index(TIMING)][0]
    return seconds


if __name__ == "__main__":
    main()
