"""Replays synthetic calls in one set of workers and writes a result file."""

from __future__ import annotations

import argparse
import contextlib
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import results
from benchmarks.gpu import gpu
from capture.call.attention_call import AttentionCall
from capture.storage.call_file import PackedCall
from replay.bench.settings import Settings
from replay.kernels.registry import select
from replay.rows.row_files import row_to_json
from replay.timing.timer import Cache
from replay.workers.environment_options import interpreters
from replay.workers.environments import assign
from replay.workers.execution import execution
from replay.workers.process import first_processes
from replay.workloads.random_calls import Spec
from replay.workloads.recorded import recorded_call
from replay.workloads.schedule import Schedule
from replay.workloads.workload import Workload

Sweeps = dict[str, dict[str, tuple[Spec, Mapping[str, Any]]]]
"""Calls by name, each with extra fields of `AttentionCall` that `Spec` lacks, grouped by the
kernels that are timed on them."""


class Group(NamedTuple):
    """Kernels, by name, and the calls to time them on; calls are made when their turn comes."""

    kernels: str
    calls: Iterable[tuple[Workload, Cache]]
    baseline: str | None = None
    """Baseline of speed-ups; None for the kernel that the model called."""


def parser(
    description: str | None, kernels: str, out: str, *, seconds: float = 2.0
) -> argparse.ArgumentParser:
    """Create the argument parser of a sweep, with the benchmark's own defaults."""
    found = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    found.add_argument("--kernels", default=kernels)
    found.add_argument("--env", action="append", default=[], metavar="NAME=PYTHON")
    found.add_argument("--out", type=Path, default=results.DIRECTORY / out)
    found.add_argument(
        "--max-seconds", type=float, default=seconds, help="sampling time per kernel and call"
    )
    return found


def sweep(groups: Iterable[Group], arguments: argparse.Namespace) -> None:
    """Run the kernels of each group, or those of `--kernels`, on its calls; write rows to `--out`.

    Kernels that are not installed are omitted; unsupported calls get a row with the reason. Needs a
    GPU: on a CPU these shapes take hours.
    """
    device = gpu()
    pythons = interpreters(arguments.env)
    rows: list[dict[str, Any]] = []
    with (
        first_processes(timeout=300.0) as first,
        execution(first, pythons, timeout=300.0) as where,
    ):
        for group in groups:
            kernels, _ = select(arguments.kernels or group.kernels)
            found = where.probe(kernels, device)
            environments = assign(kernels, found)
            for call, cache in group.calls:
                settings = Settings(
                    device, cache, max_seconds=arguments.max_seconds, baseline=group.baseline
                )
                began = time.monotonic()
                new = list(
                    where.replay(Schedule([call]), environments, settings, lambda *stage: None)
                )
                print(f"{call.name}: {time.monotonic() - began:.0f} s", flush=True)
                for row in new:
                    speed = row.time_ms and f"{row.time_ms.p50:.4f} ms, {row.tflops:.0f} TFLOPS"
                    print(f"    {row.id}: {row.status} {speed or row.reason}", flush=True)
                    if row.status != "unavailable":
                        probed = found[row.environment].get(row.kernel)
                        rows.append(row_to_json(row) | {"version": probed and probed.version})
                results.write(rows, arguments.out)  # write now, in case the run is interrupted


def cold(calls: Iterable[Workload]) -> Iterator[tuple[Workload, Cache]]:
    return ((call, "cold") for call in calls)


def sweep_all(sweeps: Sweeps, arguments: argparse.Namespace) -> None:
    """Run the kernels of each sweep, or those of `--kernels`, on its calls with random values."""

    def workloads(calls: Mapping[str, tuple[Spec, Mapping[str, Any]]]) -> Iterator[Workload]:
        for name, (spec, beyond) in calls.items():
            call = spec.call("cpu", torch.Generator().manual_seed(0), arguments.out.stem)
            with written(name, AttentionCall(**{**vars(call), **beyond})) as workload:
                yield workload

    sweep([Group(names, cold(workloads(calls))) for names, calls in sweeps.items()], arguments)


@contextlib.contextmanager
def written(name: str, call: AttentionCall) -> Iterator[Workload]:
    """Write the call to a temporary file that workers can load."""
    with tempfile.TemporaryDirectory() as directory:
        yield recorded_call(PackedCall.of(call).write(Path(directory) / f"{name}.safetensors"))
