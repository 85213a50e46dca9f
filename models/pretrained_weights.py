"""Finds the weights that ship with this package: small models of the official classes.

``models/pretrained/NAME`` is a directory that ``save_pretrained`` wrote, with a model card.
``python -m benchmarks.training.NAME`` in the repository retrains it.
"""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parent / "pretrained"


def directory(name: str) -> Path | None:
    """Return the directory of the trained weights for ``name``; None if there are none."""
    found = ROOT / name
    return found if (found / "README.md").is_file() else None


def describe(name: str, weights: str | None, seed: int) -> str:
    """Describe the weights of the built-in model ``name``, for users and manifests."""
    if weights == "pretrained":
        return f"built-in, trained; model card models/pretrained/{name}/README.md"
    return f"random, seed {seed} (built-in configuration of the trained {name})"
