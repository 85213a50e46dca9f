"""Replays synthetic calls in one set of workers and writes a result file."""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

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
from replay.workers.execution import assigned, execution
from replay.workers.process import first_processes
from replay.workloads.random_calls import Spec
from replay.workloads.recorded import recorded_call
from replay.workloads.schedule import Schedule
from replay.workloads.workload import Workload

Sweeps = dict[str, dict[str, tuple[Spec, Mapping[str, Any]]]]
"""Calls by name, each with extra fields of `AttentionCall` that `Spec` lacks, grouped by the
kernels that are timed on them."""


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


def sweep(
    calls: Sequence[tuple[Workload, Cache]],
    names: str,
    arguments: argparse.Namespace,
    rows: list[dict[str, Any]],
) -> None:
    """Run the named kernels on the calls, append their rows to `rows`, and write all to `--out`.

    Kernels that are not installed are omitted; unsupported calls get a row with the reason. Needs a
    GPU: on a CPU these shapes take hours.
    """
    device = gpu()
    kernels, _ = select(names)
    pythons = interpreters(arguments.env)
    with (
        first_processes(timeout=300.0) as first,
        execution(first, pythons, timeout=300.0) as where,
    ):
        environments = assigned(where, kernels, device, pythons)
        for call, cache in calls:
            settings = Settings(device, cache, max_seconds=arguments.max_seconds)
            began = time.monotonic()
            new = list(
                where.replay(Schedule([call]), environments, settings, lambda workload, stage: None)
            )
            rows += [row_to_json(row) for row in new if row.status != "unavailable"]
            print(f"{call.name}: {time.monotonic() - began:.0f} s", flush=True)
            for row in new:
                speed = row.time_ms and f"{row.time_ms.p50:.4f} ms, {row.tflops:.0f} TFLOPS"
                print(f"    {row.id}: {row.status} {speed or row.reason}", flush=True)
            results.write(rows, arguments.out)  # write now, in case the run is interrupted


def cold(calls: Sequence[Workload]) -> list[tuple[Workload, Cache]]:
    return [(call, "cold") for call in calls]


def sweep_all(sweeps: Sweeps, arguments: argparse.Namespace) -> None:
    """Run the kernels of each sweep, or those of `--kernels`, on its calls with random values."""
    rows: list[dict[str, Any]] = []
    for kernels, calls in sweeps.items():
        with tempfile.TemporaryDirectory() as directory:
            workloads = [
                _written(Path(directory), arguments.out.stem, name, spec, beyond)
                for name, (spec, beyond) in calls.items()
            ]
            sweep(cold(workloads), arguments.kernels or kernels, arguments, rows)


def _written(
    directory: Path, model: str, name: str, spec: Spec, beyond: Mapping[str, Any]
) -> Workload:
    """Write the call to a file that workers can load."""
    call = spec.call("cpu", torch.Generator().manual_seed(0), model)
    call = AttentionCall(**{**vars(call), **beyond})
    return recorded_call(PackedCall.of(call).write(directory / f"{name}.safetensors"))
