"""The GPU that most benchmarks need, how they time on it, and the files that they write."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import results
from replay.timing.machine import describe
from replay.timing.rounds import K, Samples, measure

MACHINE = ("machine.device", "machine.torch", "machine.triton")


def gpu() -> torch.device:
    """Return PyTorch's current GPU.

    Raises:
        SystemExit: no GPU was found.
    """
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA GPU, and PyTorch finds none here")
    return torch.device("cuda")


def measured_on(device: torch.device, columns: Sequence[str] = MACHINE) -> dict[str, Any]:
    """Return the cells of the columns that name the machine, such as `machine.torch`."""
    machine = describe(device)
    return {name: getattr(machine, name.removeprefix("machine.")) for name in columns}


def timed(
    runs: Mapping[K, Callable[[], object]], device: torch.device, rounds: int, max_seconds: float
) -> dict[K, Samples]:
    """Time functions in shuffled rounds with a cold L2, and raise the error of one that fails."""
    samples = measure(runs, device, rounds=rounds, max_seconds=max_seconds)
    for sample in samples.values():
        if sample.error is not None:
            raise sample.error
    return samples


def write_measured(
    description: str | None,
    file: str,
    columns: Sequence[str],
    lines_of: Callable[[str, torch.device], Iterable[dict[str, Any]]],
    names: Collection[str] = ("",),
) -> Path:
    """Measure on a GPU what the command line asks for, print each line, and write all so far.

    The options are `--out` and, if there are several names, `--only`.

    Args:
        description: docstring of the benchmark.
        file: default name of the result file.
        columns: columns of the file, which end with those of the machine.
        lines_of: yields the other cells of the lines of a name.
        names: groups of lines.

    Returns:
        The file.
    """
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=results.DIRECTORY / file)
    if len(names) > 1:
        parser.add_argument("--only", nargs="+", choices=names, metavar="NAME")
    arguments = parser.parse_args()
    device = gpu()
    machine = measured_on(device)
    lines: list[dict[str, Any]] = []
    with torch.no_grad():
        for name in vars(arguments).get("only") or names:
            for line in lines_of(name, device):
                lines.append(line | machine)
                results.write_lines(lines, columns, arguments.out)
                cells = (results.cell(line.get(column)) for column in columns[: -len(machine)])
                print(*cells, sep="\t", flush=True)
    found: Path = arguments.out
    return found
