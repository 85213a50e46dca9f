"""The weights that ship with this package: small models of the real classes, trained by us.

``models/pretrained/NAME`` is a directory that ``save_pretrained`` wrote, with a model card.
``python -m training.NAME`` in the repository retrains it.
"""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parent / "pretrained"


def directory(name: str) -> Path | None:
    """Return the directory of the trained weights for ``name``, if any."""
    found = ROOT / name
    return found if (found / "README.md").is_file() else None


def describe(name: str, weights: str | None, seed: int) -> str:
    """Describe the weights of the built-in model ``name``, for people and manifests."""
    if weights == "pretrained":
        return f"built-in, trained; model card models/pretrained/{name}/README.md"
    return f"random, seed {seed} (built-in configuration of the trained {name})"
