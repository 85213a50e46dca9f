"""Detect colours, shapes, textures, layout and motion from pixels, and score captions.

Detection does not see the caption. A saturated region is a thing; its hue gives the colour, and the
outline that overlaps it most, at the same area and centre of mass, gives the shape.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.training.shapes import COLOURS, LAYOUTS, MOTIONS, SHAPES, Scene

SATURATED = 0.2  # minimum difference of a coloured pixel's largest and smallest channel
SMALLEST = 0.01  # minimum area of a thing, as a share of the picture
PARTS = ("colours", "shapes", "textures", "layout", "motion", "all")
DARK = 0.8  # maximum brightness of dark pixels, relative to the bright part of a thing
MOVED = 0.1  # minimum displacement that counts as motion, in picture heights

# By shape: area in squared radii, and how far the centre of mass is below the middle, in radii.
_AREA = {"circle": 3.14159, "square": 4.0, "triangle": 2.0, "cross": 20 / 9}
_SINKS = {"circle": 0.0, "square": 0.0, "triangle": 1 / 3, "cross": 0.0}


@dataclass(frozen=True)
class Seen:
    """A thing detected in a picture; ``centre`` is (x, y)."""

    colour: str
    shape: str
    texture: str
    centre: tuple[float, float]
    area: float


def see(picture: Tensor) -> list[Seen]:
    """Detect the things in ``picture`` (3, H, W) in 0…1, largest first, one per colour."""
    picture = picture.float().cpu()
    low, high = picture.amin(0), picture.amax(0)
    coloured = high - low > SATURATED
    palette = torch.tensor(list(COLOURS.values()))
    palette = palette - palette.amin(1, keepdim=True)
    palette = palette / palette.amax(1, keepdim=True)
    hue = (picture - low)[:, coloured] / (high - low)[coloured]  # (3, N)
    nearest = torch.full_like(low, -1)
    nearest[coloured] = torch.cdist(hue.T, palette).argmin(1).float()
    found = []
    for index, colour in enumerate(COLOURS):
        region = nearest == index
        if region.float().mean() >= SMALLEST:
            found.append(_describe(colour, region, high))
    found.sort(key=lambda thing: thing.area, reverse=True)
    return [thing for thing in found if thing.area >= 0.2 * found[0].area]


@dataclass(frozen=True)
class Watched:
    """Things in the first, middle and last frame; all three are the same for a picture."""

    first: list[Seen]
    middle: list[Seen]
    last: list[Seen]


def watch(frames: Tensor) -> Watched:
    """Detect the things in ``frames`` (T, 3, H, W) in 0…1."""
    middle = see(frames[len(frames) // 2])
    if len(frames) == 1:
        return Watched(middle, middle, middle)
    return Watched(see(frames[0]), middle, see(frames[-1]))


def watch_all(shown: Sequence[Tensor]) -> list[Watched]:
    """Detect the things in each video, on one thread, which is faster for small pictures."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return [watch(frames) for frames in shown]
    finally:
        torch.set_num_threads(threads)


def _describe(colour: str, region: Tensor, brightness: Tensor) -> Seen:
    height, width = region.shape
    y = ((torch.arange(height) + 0.5) / height - 0.5)[:, None].expand(height, width)
    x = (((torch.arange(width) + 0.5) - width / 2) / height)[None].expand(height, width)
    area = float(region.sum()) / height**2
    centre = (float(x[region].mean()), float(y[region].mean()))
    overlaps = {shape: _overlap(region, x, y, centre, area, shape) for shape in SHAPES}
    shape = max(overlaps, key=overlaps.__getitem__)
    return Seen(
        colour=colour,
        shape=shape,
        texture=_texture(region, brightness),
        centre=centre,
        area=area,
    )


def _overlap(
    region: Tensor, x: Tensor, y: Tensor, centre: tuple[float, float], area: float, shape: str
) -> float:
    """Return the IoU of ``region`` and the outline with the same area and centre of mass."""
    radius = (area / _AREA[shape]) ** 0.5
    across = (x - centre[0]).abs() / radius
    down = (y - centre[1]) / radius + _SINKS[shape]
    inside = {
        "circle": across.square() + down.square() <= 1,
        "square": torch.maximum(across, down.abs()) <= 1,
        "triangle": (down <= 1) & (2 * across <= down + 1),
        "cross": torch.minimum(
            torch.maximum(3 * across, down.abs()), torch.maximum(across, 3 * down.abs())
        )
        <= 1,
    }[shape]
    return float((inside & region).sum() / (inside | region).sum())


def _texture(region: Tensor, brightness: Tensor) -> str:
    """Return plain if little but edges is dark, striped if rows are uniform, else checkered."""
    dark = region & (brightness < DARK * brightness[region].quantile(0.9))
    if dark.sum() < 0.25 * region.sum():
        return "plain"
    count = region.sum(1)
    share = dark.sum(1) / count.clamp(min=1)
    mixed = (torch.minimum(share, 1 - share) * count).sum() / count.sum()
    return "striped" if mixed < 0.2 else "checkered"


def score(scene: Scene, watched: Watched) -> dict[str, bool]:
    """Return which parts of the caption of ``scene`` are true of the ``watched`` things.

    The parts are ``colours``, ``shapes`` and ``textures`` of the middle frame, ``layout`` for two
    things, ``motion`` for a moving thing, and ``all`` parts together.
    """
    seen = {thing.colour: thing for thing in watched.middle}
    wanted = {thing.colour: thing for thing in scene.things}
    pairs = [(thing, seen.get(colour)) for colour, thing in wanted.items()]
    result = {
        "colours": seen.keys() == wanted.keys(),
        "shapes": all(it is not None and it.shape == thing.shape for thing, it in pairs),
        "textures": all(it is not None and it.texture == thing.texture for thing, it in pairs),
    }
    if scene.layout:
        result["layout"] = _layout([it for _, it in pairs]) == scene.layout
    if scene.motion:
        result["motion"] = _motion(watched) == scene.motion
    result["all"] = all(result.values())
    return result


def _layout(seen: Sequence[Seen | None]) -> str | None:
    first, second = seen
    if first is None or second is None:
        return None
    right, down = (b - a for a, b in zip(first.centre, second.centre, strict=True))
    if max(right, down) < MOVED:
        return None
    return LAYOUTS[0] if right > down else LAYOUTS[1]


def _motion(watched: Watched) -> str | None:
    """Return where the largest thing moved between the first and the last frame."""
    if not watched.first or not watched.last:
        return None
    start, end = watched.first[0].centre, watched.last[0].centre
    moved = [b - a for a, b in zip(start, end, strict=True)]
    along = {name: moved[0] * x + moved[1] * y for name, (x, y) in MOTIONS.items()}
    best = max(along, key=along.__getitem__)
    return best if along[best] >= MOVED else None


def rates(scenes: Sequence[Scene], shown: Sequence[Watched]) -> dict[str, float]:
    """Return for each part of the caption the share of its scenes where it is true."""
    scores = [score(scene, watched) for scene, watched in zip(scenes, shown, strict=True)]
    parts = dict.fromkeys(part for result in scores for part in result)
    return {
        part: sum(result[part] for result in scores if part in result)
        / sum(part in result for result in scores)
        for part in sorted(parts, key=PARTS.index)
    }


def chance(scenes: Sequence[Scene], shown: Sequence[Watched], *, seed: int = 0) -> dict[str, float]:
    """Return the rates with every picture judged against the caption of another scene."""
    order = random.Random(seed).sample(range(len(scenes)), len(scenes))
    others = [*order[1:], order[0]]
    return rates([scenes[index] for index in others], [shown[index] for index in order])
