"""Loss curves and contact sheets as PNG, drawn with only Pillow."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

WIDTH, HEIGHT = 720, 360
LEFT, RIGHT, TOP, BOTTOM = 70, 20, 30, 40
INK, FAINT = (40, 40, 40), (220, 220, 220)
COLOURS = ((31, 98, 178), (200, 80, 30), (40, 140, 70), (130, 60, 150))


def loss_curve(path: Path, curves: Mapping[str, Sequence[tuple[int, float]]], title: str) -> None:
    """Plot loss over steps, both axes logarithmic, one line per name."""
    points = [point for curve in curves.values() for point in curve if point[1] > 0]
    steps = [max(1, step) for step, _ in points]
    x_low, x_high = math.log10(min(steps)), math.log10(max(*steps, 10))
    y_low = math.log10(min(loss for _, loss in points)) - 0.05
    y_high = math.log10(max(loss for _, loss in points)) + 0.05

    def place(step: float, loss: float) -> tuple[float, float]:
        across = (math.log10(max(1, step)) - x_low) / max(x_high - x_low, 1e-9)
        up = (math.log10(loss) - y_low) / (y_high - y_low)
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (
            HEIGHT - TOP - BOTTOM
        )

    image = Image.new("RGB", (WIDTH, HEIGHT), "white")
    draw = ImageDraw.Draw(image)
    font = ImageFont.load_default(13)
    for value in _ticks(x_low, x_high):
        x, _ = place(value, 10**y_low)
        draw.line([(x, TOP), (x, HEIGHT - BOTTOM)], fill=FAINT)
        draw.text((x, HEIGHT - BOTTOM + 6), f"{value:g}", INK, font, anchor="ma")
    for value in _ticks(y_low, y_high):
        _, y = place(10**x_low, value)
        draw.line([(LEFT, y), (WIDTH - RIGHT, y)], fill=FAINT)
        draw.text((LEFT - 6, y), f"{value:g}", INK, font, anchor="rm")
    draw.text((LEFT, 8), title, INK, font)
    draw.text((WIDTH - RIGHT, HEIGHT - 18), "steps", INK, font, anchor="ra")
    for index, (name, curve) in enumerate(curves.items()):
        colour = COLOURS[index % len(COLOURS)]
        line = [place(step, loss) for step, loss in curve if loss > 0]
        if len(line) > 1:
            draw.line(line, fill=colour, width=2)
        draw.text((WIDTH - RIGHT - 8, TOP + 4 + 17 * index), name, colour, font, anchor="ra")
    image.save(path, optimize=True)


def _ticks(low: float, high: float) -> list[float]:
    """Return 1, 2 and 5 times the powers of ten in 10^low…10^high; fewer over a wide range."""
    factors = (1, 2, 5) if high - low < 2.5 else (1,)
    decades = range(math.floor(low), math.ceil(high) + 1)
    values = [factor * 10.0**decade for decade in decades for factor in factors]
    return [value for value in values if low <= math.log10(value) <= high]


def contact_sheet(
    path: Path, rows: Sequence[Sequence[Tensor]], captions: Sequence[str], *, columns: int = 1
) -> None:
    """Write rows of pictures, each with its caption below.

    Args:
        rows: Rows of pictures (3, H, W) in 0…1; a video's row has some of its frames.
        columns: How many rows are placed side by side.
    """
    _, height, width = rows[0][0].shape
    row_width = width * len(rows[0]) + 6
    font = ImageFont.load_default(11)
    below = [_wrapped(caption, row_width - 4, font) for caption in captions]
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


def _wrapped(text: str, width: int, font: ImageFont.ImageFont | ImageFont.FreeTypeFont) -> str:
    """Wrap text into lines of at most ``width`` pixels; a longer word gets its own line."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if font.getlength(longer) <= width or not lines[-1]:
            lines[-1] = longer
        else:
            lines.append(word)
    return "\n".join(lines)


def _image(picture: Tensor) -> Image.Image:
    pixels = (picture.detach().float().cpu().clamp(0, 1) * 255).round().byte()
    return Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy())
