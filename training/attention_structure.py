"""Measure how structured attention is, layer by layer, with trained and with random weights.

    python -m training.attention_structure                    all three built-in models
    python -m training.attention_structure llama --steps 2

Calls are recorded with our own `capture`, over every layer and step of one full inference; decode
calls, which have one query, are left out. A Markdown table goes to stdout.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import astuple, dataclass, fields
from pathlib import Path

import torch

import models
from capture import AttentionCall, load, record
from training.card import machine, table

QUERIES = 256  # per call and head, evenly spaced
FEWEST_KEYS = 16  # of a causal query: entropy over fewer says little
MOST_CALLS = 400


@dataclass(frozen=True)
class Structure:
    """Means over heads and queries.

    Attributes:
        entropy: entropy of the attention weights relative to uniform ones: 1 is uniform.
        largest: the largest weight of a query.
        offset: ‖mean of K over tokens‖ / ‖its standard deviation‖, norms over channels: what
            smoothing K removes, in units of what remains.
        top_mass: the total weight of the heaviest 1 % of a query's keys.
    """

    entropy: float
    largest: float
    offset: float
    top_mass: float


HEADINGS = {
    "entropy": "entropy (1 = uniform)",
    "largest": "largest weight",
    "offset": "K mean / deviation",
    "top_mass": "mass of the top 1 %",
}


def structure(call: AttentionCall) -> Structure:
    """Compute the four figures of one call, with its causality and mask."""
    query, key = call.query.float(), call.key.float()
    key_of_query = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    rows = torch.linspace(0, query.shape[2] - 1, min(QUERIES, query.shape[2])).round().long()
    scores = query[:, :, rows] @ key_of_query.mT * call.softmax_scale
    columns = torch.arange(key.shape[2])
    if call.is_causal:
        scores = scores.masked_fill(columns > rows[:, None], -math.inf)
    if call.attn_mask is not None:
        mask = call.attn_mask.expand(*call.attn_mask.shape[:-2], query.shape[2], -1)[..., rows, :]
        if mask.dtype == torch.bool:
            scores = scores.masked_fill(~mask, -math.inf)
        else:
            scores = scores + mask.float()
    valid = (scores > -math.inf).sum(-1)  # (B, H, rows)
    weights = scores.softmax(-1)
    enough = valid >= FEWEST_KEYS
    if not enough.any():
        raise ValueError(f"no query of {call.origin.module} sees {FEWEST_KEYS} keys")
    entropy = torch.special.entr(weights).sum(-1) / valid.clamp(min=2).float().log()
    ranked = weights.sort(dim=-1, descending=True).values
    top = columns < (valid / 100).ceil()[..., None]
    top_mass = (ranked * top).sum(-1)
    offset = key.mean(2).norm(dim=-1) / key.std(2).norm(dim=-1)
    return Structure(
        entropy=float(entropy[enough].mean()),
        largest=float(ranked[..., 0][enough].mean()),
        offset=float(offset.mean()),
        top_mass=float(top_mass[enough].mean()),
    )


def per_layer(runnable: models.Runnable) -> dict[str, Structure]:
    """Run the model and return each attention module's mean over its calls, in model order."""
    found: dict[str, list[Structure]] = {}
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
                found.setdefault(call.origin.module, []).append(structure(call))
    return {module: mean(structures) for module, structures in found.items()}


def mean(structures: Iterable[Structure]) -> Structure:
    columns = zip(*map(astuple, structures), strict=True)
    return Structure(*(sum(column) / len(column) for column in columns))


def compare(name: str, steps: int | None = None) -> list[list[str]]:
    """Return a row per layer of ``name``, and one for all: trained / random for each figure."""
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
            *(
                f"{getattr(here, item.name):.3f} / {getattr(there, item.name):.3f}"
                for item in fields(Structure)
            ),
        ]
        for module, here, there in rows
    ]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m training.attention_structure")
    names = ["cogvideo", "flux", "llama"]
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"any of {', '.join(names)}")
    parser.add_argument("--steps", type=int, help="denoising steps (default: the model's own)")
    given = parser.parse_args(arguments)
    rows: list[list[str]] = []
    for name in given.models or names:
        print(f"{name}: one inference with trained, one with random weights", file=sys.stderr)
        rows += compare(name, given.steps)
    headings = [f"{HEADINGS[item.name]}, trained / random" for item in fields(Structure)]
    print(table(["model", "layer", *headings], rows))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print(f"\n{machine(device)}.")


if __name__ == "__main__":
    main()
