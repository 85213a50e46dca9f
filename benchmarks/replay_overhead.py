"""Measures the cost of a replay beyond the kernels' time: loading calls, and everything else.

    python -m benchmarks.replay_overhead                         calls made here, on the CPU
    python -m benchmarks.replay_overhead --dir captured_inputs --device cuda

Loads every call of a recording with and without checksums and reads the same files plainly, in
shuffled rounds, cold (not in the page cache) and warm. Then replays the recording with the command
(`benchmarks.marked_replay`), and compares the total time with the timed rounds and their warm-up.
On a GPU, this is repeated with `--metric all`, which also times blocks of calls for their energy.
Replaces the measured figures in `benchmarks/results/replay_overhead.csv`, one line each.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import results
from benchmarks.capture_overhead import COLUMNS, GIB, MACHINE, Figures
from benchmarks.defence_overhead import KERNELS
from capture import load, record
from capture.storage.dataset import Dataset
from replay.bench.reported_stages import LOADING, REFERENCE, TIMING
from replay.timing.machine import describe

START = "start of the command and its workers"
CHECKS = "checking outputs"
ROUNDS = "timed rounds and warm-up"
ENERGY = "blocks of calls, for their energy"
AGAIN = "checking what was timed"
END = "tables and the end of workers"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--dir", type=Path, help="recording (default: random calls)")
    parser.add_argument("--calls", type=int, default=4, help="number of random calls (default 4)")
    parser.add_argument(
        "--length", type=int, default=4096, help="length of random calls (default 4096)"
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--kernels", help="kernels, as for `replay` (default: kernels without extra packages)"
    )
    parser.add_argument(
        "--metric",
        choices=("all",),
        help="replay only with this metric (default on a GPU: with and without)",
    )
    parser.add_argument("--rounds", type=int, default=5, help="rounds of loading (default 5)")
    parser.add_argument("--rows", type=Path, help="file for the rows of the replay")
    parser.add_argument("--out", type=Path, default=results.DIRECTORY / "replay_overhead.csv")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    if arguments.metric and device.type != "cuda":
        parser.error("--metric all measures energy, for which it needs --device cuda")
    machine = describe(device)
    with tempfile.TemporaryDirectory() as scratch:
        directory = arguments.dir or made_here(Path(scratch), arguments.calls, arguments.length)
        capture = load(directory).captures[0]
        figures = Figures(
            capture.model,
            capture.weights,
            {f"machine.{name}": getattr(machine, name) for name in MACHINE},
        )
        if arguments.rounds:
            loading(directory, arguments.rounds, figures)
        rows = arguments.rows or Path(scratch) / "rows.jsonl"
        kernels = arguments.kernels or KERNELS[device.type]
        if arguments.metric is None:
            whole(directory, kernels, device, rows, figures, with_energy=False)
        if device.type == "cuda":
            whole(directory, kernels, device, rows, figures, with_energy=True)
    measured = {line["figure"] for line in figures.lines}
    written = results.read(arguments.out) if arguments.out.exists() else []
    others = [line for line in written if line["figure"] not in measured]
    results.write_lines([*others, *figures.lines], COLUMNS, arguments.out)


class Attention(nn.Module):
    """One call of random values; only the size matters."""

    def forward(self, length: int) -> Tensor:
        query, key, value = torch.randn(3, 1, 8, length, 128).unbind()
        return F.scaled_dot_product_attention(query, key, value)


def made_here(scratch: Path, calls: int, length: int) -> Path:
    """Record calls of random values."""
    attention = Attention()
    with torch.no_grad(), record(attention, scratch / "recorded", max=calls, weights="random"):
        for _ in range(calls):
            attention(length)
    return scratch / "recorded"


def loading(directory: Path, rounds: int, figures: Figures) -> None:
    """Time loading to the CPU and plain reading of the files, cold and warm."""
    dataset = Dataset.open(directory)
    paths = [entry.path for entry in dataset.entries]
    size = dataset.nbytes / GIB
    ways: dict[str, Callable[[], None]] = {
        "checked": lambda: load_all(directory, check=True),
        "unchecked": lambda: load_all(directory, check=False),
        "plain read": lambda: read_all(paths),
    }
    for state in ("cold", "warm"):
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(rounds):
            for name in random.sample(list(ways), len(ways)):
                if state == "cold":
                    drop(paths)
                start = time.perf_counter()
                ways[name]()
                seconds[name].append(time.perf_counter() - start)
        for name in ways:
            rates = [size / each for each in seconds[name]]
            figures.add(f"loading, {state}: {name}", "GiB/s", rates)
        for name in ("checked", "unchecked"):
            pairs = zip(seconds["plain read"], seconds[name], strict=True)
            ratios = [plain / each for plain, each in pairs]
            figures.add(f"loading, {state}: {name} / plain read", "×", ratios)


def load_all(directory: Path, *, check: bool) -> None:
    for _ in load(directory, check=check):
        pass


def read_all(paths: list[Path]) -> None:
    """Read each file into its own memory, as loading has to."""
    for path in paths:
        buffer = torch.empty(path.stat().st_size, dtype=torch.uint8)  # uninitialised, as in loading
        with path.open("rb", buffering=0) as file:
            rest = memoryview(buffer.numpy().data)
            while rest and (read := file.readinto(rest)):
                rest = rest[read:]


def drop(paths: list[Path]) -> None:
    """Drop files from the page cache."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)  # pages not yet on the disk stay cached
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def whole(
    directory: Path,
    kernels: str,
    device: torch.device,
    json_file: Path,
    figures: Figures,
    *,
    with_energy: bool,
) -> None:
    """Time the whole command and each of its stages."""
    name = "replay --metric all" if with_energy else "replay"
    with tempfile.TemporaryDirectory() as scratch:
        said = Path(scratch) / "marks.json"
        command = [sys.executable, "-m", "benchmarks.marked_replay", str(said)]
        command += ["--dir", str(directory), "--device", str(device)]
        command += [] if kernels == "default" else ["--kernels", kernels]
        command += ["--metric", "all"] if with_energy else []
        begin = time.perf_counter()
        subprocess.run([*command, "--json", str(json_file)], check=True, stdout=subprocess.DEVNULL)
        seconds = time.perf_counter() - begin
        marks = json.loads(said.read_text())
        rows = list(results.read_jsonl(json_file))
    stages = by_stage(begin, marks, rows, with_energy=with_energy)
    samples = [row["time_ms"] for row in rows if row["time_ms"]]
    timed = max(len(samples), 1)
    calls = len({row["call"]["name"] for row in rows})
    figures.add(f"{name}: calls of the recording", "", [float(calls)])
    figures.add(f"{name}: the command", "s", [seconds])
    for stage, spent in stages.items():
        figures.add(f"{name}: {stage}", "s", [spent])
    in_samples = sum(each["n"] * each["p50"] for each in samples) / 1e3
    figures.add(f"{name}: samples in these rounds", "s", [in_samples])
    figures.add(f"{name}: {END}", "s", [seconds - sum(stages.values())])
    own = stages[ROUNDS] + stages.get(ENERGY, 0.0)
    figures.add(f"{name}: the command / timed work and warm-up", "×", [seconds / own])
    # Compiling, and a library's set-up in its first call, count as kernel time.
    first_calls = sum(row["first_call_ms"] or 0.0 for row in rows) / 1e3
    figures.add(f"{name}: first calls of kernels, in these checks", "s", [first_calls])
    own += first_calls
    figures.add(f"{name}: the command / first calls, timed work and warm-up", "×", [seconds / own])
    beside = seconds - own - stages[START]
    figures.add(f"{name}: beside all of these and the start, for each row", "s", [beside / timed])


def by_stage(
    begin: float,
    marks: list[tuple[float, str, str]],
    rows: list[dict[str, Any]],
    *,
    with_energy: bool = False,
) -> dict[str, float]:
    """Return the seconds of each stage of a command until its last row.

    Args:
        marks: time, call and stage of each report; the last report has neither call nor stage.
    """
    stages: dict[str, float] = defaultdict(float)
    stages[START] = marks[0][0] - begin
    of_calls = [list(each) for _, each in itertools.groupby(marks, key=lambda mark: mark[1])]
    for seen, after in itertools.pairwise(of_calls):
        timed = sum(row["call"]["name"] == seen[0][1] and bool(row["time_ms"]) for row in rows)
        reports = [(at, stage) for at, _, stage in seen]
        for stage, spent in _spent(reports, after[0][0], timed, with_energy):
            stages[stage] += spent
    return dict(stages)


def _spent(
    seen: list[tuple[float, str]], end: float, timed: int, with_energy: bool
) -> list[tuple[str, float]]:
    """Return the stage and seconds of each report of one call.

    Args:
        timed: number of timed kernels; each kernel has one more report at the end.
        with_energy: every kernel also has a report for its energy.
    """
    times = [at for at, _ in seen] + [end]
    names = [stage for _, stage in seen]
    timing = names.index(TIMING) if TIMING in names else len(names)
    again = len(names) - timed
    energy = again - len({*names[:timing]} - {LOADING, REFERENCE}) if with_energy else again
    found: list[tuple[str, float]] = []
    for place, stage in enumerate(names):
        if stage in (LOADING, REFERENCE):
            named = stage
        elif place < timing:
            named = CHECKS
        elif place < energy:
            named = ROUNDS
        else:
            named = ENERGY if place < again else AGAIN
        found.append((named, times[place + 1] - times[place]))
    return found


if __name__ == "__main__":
    main()
