"""Measures block-sparse attention's error on recorded calls and on random values (needs no GPU).

    python -m benchmarks.sparse_inputs [--models cogvideo,flux] [--out FILE]

Records the trained built-in models, chooses blocks by pooled scores as `triton-block-sparse` does,
and compares attention to these blocks with attention to all keys, in float32. Does the same for
random values of the same shapes: standard normal, and with the recorded mean and deviation of each
channel. Writes `benchmarks/results/sparse_inputs.csv`: a line for each model, kind of values
and share of the blocks.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

import capture
from attention_kernels.sparse.block_policy import BlockPolicy, kept_blocks
from benchmarks import results
from benchmarks.gpu import measured_on
from benchmarks.trained_runs import trained_runs
from capture.call.attention_call import AttentionCall
from capture.recording.record import record
from replay.accuracy.errors import compare
from replay.kernels.chosen_keys import mask_of_blocks
from replay.rows.errors_of_output import Errors
from replay.workloads.synthetic_counterparts import KINDS, counterpart

MODELS = ("cogvideo", "flux")
SHARES = (0.5, 0.25, 0.1)
LENGTH = 64
"""Number of queries in a tile and of keys in a block: half of the kernel's at head_dim 128, because
the models' sequences are short."""
PROMPTS, STEPS = 2, 3
ALL = 1000
"""More calls than a run has."""
MACHINE = ("machine.device", "machine.python", "machine.torch")
COLUMNS = (
    *("model", "calls", "tokens", "values", "keep", "kept"),
    *("cosine.median", "cosine.worst", "relative_l1.median", "relative_l1.worst"),
    *MACHINE,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--out", type=Path, default=results.DIRECTORY / "sparse_inputs.csv")
    arguments = parser.parse_args()
    fields = measured_on(torch.device("cpu"), MACHINE)
    lines = [line | fields for name in arguments.models.split(",") for line in measured(name)]
    results.write_lines(lines, COLUMNS, arguments.out)


def measured(name: str) -> Iterator[dict[str, Any]]:
    """Yield the lines of a model."""
    runnable, runs = trained_runs(name, PROMPTS, steps=STEPS)
    watched = runnable.roots if runnable.pipeline is None else runnable.pipeline
    with tempfile.TemporaryDirectory() as scratch:
        for prompt, run in enumerate(runs):
            with torch.no_grad(), record(watched, out=scratch, max=ALL, name=str(prompt)):
                run()
        calls = list(capture.load(scratch))
    for values in ("recorded", *KINDS):
        given = calls if values == "recorded" else [counterpart(call, values, 0) for call in calls]
        by_call = [errors(call) for call in given]
        for keep in SHARES:
            found = [each[keep] for each in by_call]
            cosines = [each.cosine for each, _ in found]
            distances = [each.relative_l1 for each, _ in found]
            yield {
                "model": name,
                "calls": len(calls),
                "tokens": max(call.shape.kv_len for call in calls),
                "values": values,
                "keep": keep,
                "kept": statistics.mean(kept for _, kept in found),
                "cosine.median": statistics.median(cosines),
                "cosine.worst": min(cosines),
                "relative_l1.median": statistics.median(distances),
                "relative_l1.worst": max(distances),
            }


def errors(call: AttentionCall) -> dict[float, tuple[Errors, float]]:
    """Return, by share of the blocks, the errors of attention to them and the share of the pairs
    kept."""
    tensors = call.query, call.key, call.value
    dense = scaled_dot_product_attention(*tensors, scale=call.scale)
    found = {}
    for keep in SHARES:
        kept = kept_blocks(call.query, call.key, BlockPolicy(keep=keep), LENGTH, LENGTH)
        mask = mask_of_blocks(kept, LENGTH, LENGTH, call)
        sparse = scaled_dot_product_attention(*tensors, mask, scale=call.scale)
        found[keep] = compare(sparse, dense), float(mask.float().mean())
    return found


if __name__ == "__main__":
    main()
