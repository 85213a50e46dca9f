"""The weights that come with this package: small models of the real classes, trained by us.

``models/pretrained/NAME`` is a directory that ``save_pretrained`` wrote, with a model card. How it
was made: ``python -m training.NAME`` in the repository.
"""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parent / "pretrained"


def directory(name: str) -> Path | None:
    """Where the weights for ``name`` are; None where nobody trained any."""
    found = ROOT / name
    return found if (found / "README.md").is_file() else None


def describe(name: str, weights: str | None, seed: int) -> str:
    """Which weights the built-in model of that configuration has, for people and manifests."""
    if weights == "pretrained":
        return f"built-in, trained; model card models/pretrained/{name}/README.md"
    return f"random, seed {seed} (built-in configuration of the trained {name})"
