"""Measure how structured attention is, layer by layer, with trained and with random weights.

    python -m benchmarks.training.attention_structure                    all three built-in models
    python -m benchmarks.training.attention_structure llama --steps 2

Calls are recorded with our own `capture`, over every layer and step of one full inference; decode
calls, which have one query, are omitted. A Markdown table goes to stdout.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import torch

import models
from benchmarks.training.card import machine, table
from capture import load, record
from capture.call.statistics import CallStatistics, call_statistics, mean

MOST_CALLS = 400


HEADINGS = {
    "entropy": "entropy (1 = uniform)",
    "largest": "largest weight",
    "key_offset": "K mean / deviation",
    "top_mass": "mass of the top 1 %",
}


def per_layer(runnable: models.Runnable) -> dict[str, CallStatistics]:
    """Run the model and return each attention module's mean over its calls, in model order."""
    found: dict[str, list[CallStatistics]] = {}
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "calls"
        with record(
            runnable.roots,
            out=out,
            max=MOST_CALLS,
            weights=runnable.weights,
            output=False,
        ):
            runnable.run()
        for call in sorted(load(out), key=lambda call: call.origin.call_index):
            if call.query.shape[2] > 1:
                found.setdefault(call.origin.module, []).append(call_statistics(call))
    return {module: mean(structures) for module, structures in found.items()}


def compare(name: str, steps: int | None = None) -> list[list[str]]:
    """Return a row per layer of ``name``, and a row for all layers: trained / random for each
    figure."""
    layers = {
        weights: per_layer(models.load(name, size="tiny", weights=weights, steps=steps))
        for weights in ("pretrained", "random")
    }
    trained, drawn = layers["pretrained"], layers["random"]
    rows = [(module, trained[module], drawn[module]) for module in trained]
    rows.append(("all layers", mean(trained.values()), mean(drawn.values())))
    return [
        [
            name,
            module,
            *(f"{getattr(here, name):.3f} / {getattr(there, name):.3f}" for name in HEADINGS),
        ]
        for module, here, there in rows
    ]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training.attention_structure")
    names = ["cogvideo", "flux", "llama"]
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"any of {', '.join(names)}")
    parser.add_argument("--steps", type=int, help="denoising steps (default: the model's own)")
    given = parser.parse_args(arguments)
    rows: list[list[str]] = []
    for name in given.models or names:
        print(f"{name}: one inference with trained, one with random weights", file=sys.stderr)
        rows += compare(name, given.steps)
    headings = [f"{HEADINGS[name]}, trained / random" for name in HEADINGS]
    print(table(["model", "layer", *headings], rows))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print(f"\n{machine(device)}.")


if __name__ == "__main__":
    main()
