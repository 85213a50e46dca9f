"""Times the stages of `tune --sparse` for CogVideoX-2b's calls (needs a GPU).

    python -m benchmarks.sparse_tuning_time [--scratch /dev/shm] [--kernels NAMES] [--out FILE]

Writes `benchmarks/results/sparse_tuning_time.csv`, one line for each stage, and prints it.

The full-size CogVideoX-2b has random weights, whose attention has no pattern, so only the time is
meaningful. Two steps are run and recorded, which are 60 calls of 17,776 tokens and 33 GB; 30 calls
and 17 GB with `--steps 1`. The directory may be in memory. Foretelling sensitivities takes a number
of runs, and so more time with more steps. The runs that judge plans come on top.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import models
from benchmarks import results
from benchmarks.gpu import MACHINE, gpu, measured_on
from replay.api.tuning_planner import planner_of
from replay.api.tuning_recording import recorded
from replay.api.tuning_sparsity import MOST_CALLS, sparse_candidates
from replay.api.tuning_stages import Stages
from replay.distribution.pace import Pace
from replay.distribution.time_limit import TimeLimit
from replay.kernels.registry import find
from replay.report.progress import shown_progress
from replay.sketches.make_sketch import make_sketch
from replay.sparsity.foretold_sensitivity import DIRECTIONS, by_head, kernels_of
from replay.sparsity.kernel import SparseKernel
from replay.tune.compared_calls import with_nearest
from replay.tune.directory import TuningDirectory
from replay.tune.judged_runs import JudgedRuns
from replay.tune.quality import QualityBudget
from replay.tune.search import MOST_TRIALS
from replay.workers.execution import Progress
from replay.workloads.workload import Workload

COLUMNS = ("stage", "seconds", "detail", *MACHINE)


@contextmanager
def reported() -> Iterator[dict[str, float]]:
    """Yield the seconds of the stages that a replay reports; a kernel's stage has its name."""
    seconds: dict[str, float] = defaultdict(float)
    latest, begin = "start of workers", time.monotonic()

    def end_of_stage(following: str) -> None:
        nonlocal latest, begin
        seconds[latest] += time.monotonic() - begin
        latest, begin = following, time.monotonic()

    @contextmanager
    def shown(pace: Pace, *, quiet: bool) -> Iterator[Progress]:
        def report(workload: Workload, stage: str, device: str = "") -> None:
            end_of_stage(stage)
            shown_stage(workload, stage, device)

        with shown_progress(pace, quiet=quiet) as shown_stage:
            yield report

    with patch("replay.report.progress.shown_progress", shown):
        yield seconds
    end_of_stage("")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kernels", default="torch-default,triton-fa3,triton-fp8")
    parser.add_argument("--scratch", type=Path, help="directory for the recording")
    parser.add_argument("--steps", type=int, default=2, help="denoising steps (default: 2)")
    parser.add_argument("--size", default="full", help="full, or tiny for a trial run")
    parser.add_argument("--out", type=Path, default=results.DIRECTORY / "sparse_tuning_time.csv")
    arguments = parser.parse_args()
    device = gpu()
    runnable = models.load(
        "cogvideo",
        size=arguments.size,
        weights="random",
        device="cuda",
        steps=arguments.steps,
        arguments={"output_type": "latent"},
    )
    fields = measured_on(device)
    lines: list[dict[str, Any]] = []

    @contextmanager
    def timed(stage: str) -> Iterator[dict[str, Any]]:
        torch.cuda.synchronize()
        begin = time.monotonic()
        line: dict[str, Any] = {"stage": stage}
        yield line
        torch.cuda.synchronize()
        lines.append({**line, "seconds": time.monotonic() - begin, **fields})
        print(f"{stage}: {lines[-1]['seconds']:.1f} s {line.get('detail', '')}", flush=True)

    runs = JudgedRuns(runnable, [runnable.run])
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as scratch:
        files = TuningDirectory(Path(scratch) / "plan.json.tuning", {})
        budget = QualityBudget("relative_l1", 0.1)
        with files.held():
            with torch.no_grad(), timed("run the model (warm-up)"):
                runnable.run()
            with torch.no_grad(), timed("count and record calls"):
                capture = recorded(runnable, runnable.run, files, quiet=True, most=MOST_CALLS)
            kernel = SparseKernel()
            stages = Stages(
                runnable, budget, files, arguments.kernels, 30, TimeLimit(None), True, runs, kernel
            )
            with timed("compare dense kernels") as line:
                with reported() as parts:
                    rows = stages.compared(capture)
                line["detail"] = ", ".join(f"{each} {parts[each]:.1f} s" for each in parts)
            entries = stages.recorded_calls()
            rows = with_nearest(rows, entries)
            with timed("examine sparse attention") as line:
                found, _ = sparse_candidates(
                    kernel, files, entries, rows, "cuda", TimeLimit(None), quiet=True
                )
                line["detail"] = f"{len(found.calls)} calls"
            if not found.calls:
                raise SystemExit("sparse attention was examined at no call: see `replay tune`")
            pace = next(iter(found.calls.values())).pace
            with timed("foretell sensitivities") as line:
                sketch = make_sketch(
                    runnable.roots,
                    [runnable.run],
                    [find(name) for name in kernels_of(kernel.name)],
                    model=runnable.name,
                    pipeline=runnable.pipeline,
                    directions=DIRECTIONS,
                    by_head=by_head,
                )
                gib = torch.cuda.max_memory_allocated() / 2**30
                line["detail"] = f"{sketch.runs} passes, {gib:.0f} GiB of GPU memory"
            with timed("plans for all trials") as line:
                planner, low, high = planner_of(capture, rows, sketch, sparse=found)
                for trial in range(MOST_TRIALS):
                    plan = planner(low * (high / low) ** (trial / (MOST_TRIALS - 1)))
                line["detail"] = f"{len(plan.kernels)} kernels in the fastest plan"
            lines.append(
                {
                    "stage": "sparse time over dense",
                    "detail": f"{pace.fixed:.3f} + {pace.per_block:.3f} · density",
                    **fields,
                }
            )
    total = sum(line.get("seconds", 0.0) for line in lines[1:])
    lines.append({"stage": "all stages", "seconds": total, **fields})
    results.write_lines(lines, COLUMNS, arguments.out)
    for line in lines:
        print(*(results.cell(line.get(name)) for name in COLUMNS[:3]), sep="\t")


if __name__ == "__main__":
    main()
