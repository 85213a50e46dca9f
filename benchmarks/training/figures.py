"""Loss curves and contact sheets as PNG."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

import vl_convert
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

INK = (40, 40, 40)
WIDEST = 6  # width of a caption's widest characters, in pixels


def loss_curve(path: Path, curves: Mapping[str, Sequence[tuple[int, float]]], title: str) -> None:
    """Plot loss over steps, both axes logarithmic, one line per name."""
    points = [
        {"steps": step, "loss": loss, "curve": name}
        for name, curve in curves.items()
        for step, loss in curve
    ]
    logarithmic = {"type": "quantitative", "scale": {"type": "log"}}
    spec = {
        "title": title,
        "width": 640,
        "height": 300,
        "data": {"values": points},
        "mark": "line",
        "encoding": {
            "x": {"field": "steps", **logarithmic},
            "y": {"field": "loss", **logarithmic},
            "color": {"field": "curve", "type": "nominal", "title": None, "sort": list(curves)},
        },
    }
    path.write_bytes(vl_convert.vegalite_to_png(spec))


def contact_sheet(
    path: Path, rows: Sequence[Sequence[Tensor]], captions: Sequence[str], *, columns: int = 1
) -> None:
    """Write rows of pictures, each with its caption below.

    Args:
        rows: Rows of pictures (3, H, W) in 0…1; a video's row has some of its frames.
        columns: Number of rows placed side by side.
    """
    _, height, width = rows[0][0].shape
    row_width = width * len(rows[0]) + 6
    font = ImageFont.load_default(11)
    below = [textwrap.fill(caption, max(1, (row_width - 4) // WIDEST)) for caption in captions]
    row_height = height + 8 + 14 * max(caption.count("\n") + 1 for caption in below)
    lines = math.ceil(len(rows) / columns)
    sheet = Image.new("RGB", (columns * row_width, lines * row_height), "white")
    draw = ImageDraw.Draw(sheet)
    for index, (row, caption) in enumerate(zip(rows, below, strict=True)):
        left, top = index % columns * row_width, index // columns * row_height
        for place, picture in enumerate(row):
            sheet.paste(_image(picture), (left + place * width, top))
        draw.multiline_text((left + 2, top + height + 3), caption, INK, font, spacing=1)
    # A palette image is a third of the size, and good enough to look at.
    sheet.quantize(128).save(path, optimize=True)


def _image(picture: Tensor) -> Image.Image:
    pixels = (picture.detach().float().cpu().clamp(0, 1) * 255).round().byte()
    return Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy())
