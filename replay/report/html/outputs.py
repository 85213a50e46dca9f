"""Saved outputs of each model, reduced in size for a page."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from replay.end_to_end.saved_outputs import safe_name
from replay.report.html.model import Check

WIDTH = 256
"""Width of a picture in pixels."""
PICTURES = 3
"""Maximum number of pictures per kernel, spread from the first to the last."""
CHARACTERS = 4000
"""Maximum number of characters of an output text."""


def saved_outputs(directory: Path, checks: Sequence[Check]) -> dict[str, list[dict[str, Any]]]:
    """Return the saved outputs of each model's checks, the model's own attention first.

    Returns:
        A list for each model, with `kernel`, `pictures` as data URLs, and `text` or None. A kernel
        without a viewable file has no entry.
    """
    found: dict[str, list[dict[str, Any]]] = {}
    for check in checks:
        model = check["model"]
        shown = found.setdefault(model, [])
        shown += _of_kernel(directory / safe_name(model), check["kernel"])
    return {model: shown for model, shown in found.items() if shown}


def _of_kernel(directory: Path, kernel: str) -> Iterator[dict[str, Any]]:
    place = directory / safe_name(kernel)
    files = sorted(place.glob("frame-*.png")) or sorted(place.glob("image-*.png"))
    chosen = {0, len(files) // 2, len(files) - 1} if len(files) > PICTURES else range(len(files))
    pictures = [_data_url(files[at]) for at in sorted(chosen)]
    text = None
    if (file := place / "text.txt").is_file():
        text = file.read_text("utf-8", errors="replace")[:CHARACTERS]
    if pictures or text is not None:
        yield {"kernel": kernel, "pictures": pictures, "text": text}


def _data_url(path: Path) -> str:
    with Image.open(path) as opened:
        picture = opened.convert("RGB")
    picture.thumbnail((WIDTH, WIDTH))
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG", quality=85)
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"
