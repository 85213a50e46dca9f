"""Measures the errors of 8-bit attention at each layer and step of the trained built-in models.

    python -m benchmarks.attention_errors [--models cogvideo,flux,llama] [--out FILE]

Needs no GPU: the 8-bit kernels are `emulated_8_bit.py`'s. The models run in bfloat16 for several
prompts, all calls of attention are recorded, and the kernels are replayed on them. Writes
`benchmarks/results/attention_errors.csv`: one line per kernel, model, prompt, layer and step.
`benchmarks.plan_alternatives` reads it.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks import results
from benchmarks.trained_runs import trained_runs
from capture.recording.record import record
from replay.api.replay_calls import replay
from replay.plan.cells import error_energy

KERNELS = (
    "torch-default",
    "benchmarks/emulated_8_bit.py:sage_fp8",
    "benchmarks/emulated_8_bit.py:fp8",
)
MODELS = ("cogvideo", "flux", "llama")
PROMPTS = 4
STEPS = 6
"""Number of denoising steps."""
ALL = 1000
"""More calls than a run has."""
SECONDS = 0.01
"""Time limit of the samples of a kernel and call, which are not used."""

MACHINE = ("device", "python", "torch")
COLUMNS = (
    *("model", "prompt", "layer", "step", "kernel", "error_energy", "relative_l1"),
    *(f"machine.{name}" for name in MACHINE),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--out", type=Path, default=results.DIRECTORY / "attention_errors.csv")
    arguments = parser.parse_args()
    lines = [line for name in arguments.models.split(",") for line in measured(name)]
    results.write_lines(lines, COLUMNS, arguments.out)


def measured(name: str) -> Iterator[dict[str, Any]]:
    """Yield the errors of the kernels at each call of a model."""
    steps = None if name == "llama" else STEPS
    runnable, runs = trained_runs(name, PROMPTS, steps=steps, dtype="bfloat16")
    watched = runnable.roots if runnable.pipeline is None else runnable.pipeline
    with tempfile.TemporaryDirectory() as scratch:
        for prompt, run in enumerate(runs):
            with torch.no_grad(), record(watched, out=scratch, max=ALL, name=str(prompt)):
                run()
        rows = replay(
            scratch, kernels=KERNELS, device="cpu", rounds=1, max_seconds=SECONDS, workers=False
        )
    calls = sorted((row.call for row in rows), key=lambda call: call.call_index)
    layers = [*dict.fromkeys(call.module for call in calls)]
    for row in rows:
        if row.accuracy is None or row.status != "ok":
            raise RuntimeError(f"{row.kernel} on {row.call.name}: {row.status}, {row.reason}")
        errors = row.accuracy.reference
        yield {
            "model": name,
            "prompt": row.call.model,
            "layer": layers.index(row.call.module),
            "step": row.call.step,
            "kernel": row.kernel.rpartition(":")[2],
            "error_energy": error_energy(errors),
            "relative_l1": errors.relative_l1,
            **{f"machine.{each}": getattr(row.machine, each) for each in MACHINE},
        }


if __name__ == "__main__":
    main()
