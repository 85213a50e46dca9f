"""Compares a recording with a plain run and a raw write of as many bytes, in one or two trees.

    python -m benchmarks.recording_cost [--old PATH]      needs a GPU; two to four minutes
    python -m benchmarks.recording_cost --size tiny       tries the benchmark on a CPU

Each tree has a process of its own with CogVideoX-2b and random weights. In every round, each
process runs its model plain and recorded, and then writes as many bytes to the same disk, file by
file, each with an fsync. Every ratio is taken within a round. `--old` is the root of another
checkout, for comparison. Writes this tree's figures to `benchmarks/results/recording_cost.csv`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--size", choices=("tiny", "full"), default="full")
    parser.add_argument("--old", type=Path, help="root of another checkout to compare with")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--max", type=int, default=10, help="calls to keep (default 10)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--directory", type=Path, help="disk to write to (default: temporary)")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/recording_cost.csv")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments)
        return
    from benchmarks.gpu import gpu

    if arguments.size == "full":
        gpu()
    trees = {"this tree": ROOT} | ({"old tree": arguments.old.resolve()} if arguments.old else {})
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in trees}
    with contextlib.ExitStack() as stack:
        processes = {name: stack.enter_context(Process(root)) for name, root in trees.items()}
        machines = {name: process.ask("machine") for name, process in processes.items()}
        for process in processes.values():
            process.ask("raw")  # the first bytes in a machine's memory and on its disk are slower
        for index in range(arguments.rounds + 1):
            for name, process in processes.items():
                found = {what: process.ask(what) for what in ("plain", "recorded", "raw")}
                rounds[name].append(found)
                print(f"{name}, round {index}: {json.dumps(found)}", flush=True)
    report(rounds, machines, arguments.out)


def report(
    rounds: dict[str, list[dict[str, Any]]], machines: dict[str, dict[str, Any]], out: Path
) -> None:
    """Print the figures of each tree, and write those of this tree.

    The first round has figures of its own, because a process's first recording allocates memory
    that later ones use again.
    """
    from benchmarks import results
    from benchmarks.capture_overhead import COLUMNS, GIB, Figures

    for name, found in rounds.items():
        machine = {f"machine.{field}": value for field, value in machines[name].items()}
        figures = Figures("CogVideoX-2b", "random", machine)
        print(f"\n{name}, {machines[name]}")
        recorded, raw = ([each[what] for each in found] for what in ("recorded", "raw"))
        slower = [each["recorded"]["seconds"] / each["plain"]["seconds"] for each in found]
        flush = [each["nbytes"] / GIB / each["flush_seconds"] for each in recorded]
        bare = [each["nbytes"] / GIB / each["seconds"] for each in raw]
        shares = [own / limit for own, limit in zip(flush, bare, strict=True)]
        figures.add("plain run", "s", [each["plain"]["seconds"] for each in found[1:]])
        kept = f"{recorded[0]['kept']} calls kept"
        figures.add(f"{kept}: size", "GiB", [each["nbytes"] / GIB for each in recorded[1:]])
        figures.add(f"{kept}: run until the model returned / plain", "×", slower[1:])
        figures.add(f"{kept}: the same, first recording", "×", slower[:1])
        figures.add(f"{kept}: flush after the model returned", "GiB/s", flush[1:])
        figures.add("raw write of as many bytes, with fsync", "GiB/s", bare[1:])
        figures.add(f"{kept}: flush / raw write", "×", shares[1:])
        figures.add(f"{kept}: flush / raw write, first recording", "×", shares[:1])
        if name == "this tree":
            results.write_lines(figures.lines, COLUMNS, out)


class Process:
    """A process that measures one tree, with this file's code and the tree's packages."""

    def __init__(self, root: Path) -> None:
        command = [sys.executable, __file__, *sys.argv[1:], "--serve"]
        environment = {**os.environ, "PYTHONPATH": str(root)}
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, text=True, cwd=root, env=environment
        )

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def ask(self, what: str) -> Any:
        """Return the figures of one measurement by the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(what, file=self._process.stdin, flush=True)
        for line in self._process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise SystemExit("a measuring process ended; its error is above")


def serve(arguments: argparse.Namespace) -> None:
    """Answer each line of stdin with one line of figures, with the packages of PYTHONPATH."""
    sys.path.remove(str(Path(__file__).parent))  # its modules must not hide others
    import torch

    import models
    from capture import record

    on_gpu = arguments.size == "full"
    device = "cuda" if on_gpu else "cpu"
    runnable = models.load(
        "cogvideo", size=arguments.size, weights="random", steps=arguments.steps, device=device
    )
    latest = {"nbytes": arguments.max * (512 << 20 if on_gpu else 14 << 20), "kept": arguments.max}

    def seconds(function: Callable[[], object]) -> float:
        if on_gpu:
            torch.cuda.synchronize()
        start = time.perf_counter()
        function()
        if on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter() - start

    def recorded() -> dict[str, Any]:
        with scratch() as out:
            with record(runnable.roots, out, max=arguments.max) as recording:
                until_returned = seconds(runnable.run)
                start = time.perf_counter()
            flush = time.perf_counter() - start
        latest.update(nbytes=recording.counts.nbytes, kept=recording.kept)
        found = {"seconds": until_returned, "flush_seconds": flush, **latest}
        return found | {"problems": recording.problems}

    def raw() -> dict[str, Any]:
        values = torch.randint(256, (latest["nbytes"] // latest["kept"],), dtype=torch.uint8)
        with scratch() as out:
            taken = raw_seconds(memoryview(values.numpy().data), latest["kept"], Path(out))
        return {"seconds": taken, "nbytes": values.numel() * latest["kept"]}

    def scratch() -> tempfile.TemporaryDirectory[str]:
        return tempfile.TemporaryDirectory(dir=arguments.directory)

    answers: dict[str, Callable[[], dict[str, Any]]] = {
        "machine": lambda: {
            "device": torch.cuda.get_device_name() if on_gpu else "CPU",
            "torch": torch.__version__,
            "cuda": torch.version.cuda if on_gpu else "",
            "usable_cpus": len(os.sched_getaffinity(0)),
        },
        "plain": lambda: {"seconds": seconds(runnable.run)},
        "recorded": recorded,
        "raw": raw,
    }
    runnable.run()  # warm up
    for line in sys.stdin:
        print(json.dumps(answers[line.strip()]()), flush=True)


def raw_seconds(values: memoryview, files: int, out: Path) -> float:
    """Write the same bytes to several files, one after another, each with an fsync."""
    start = time.perf_counter()
    for index in range(files):
        with open(out / str(index), "wb", buffering=0) as file:
            rest = values
            while rest:
                rest = rest[file.write(rest) :]
            os.fsync(file.fileno())
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
