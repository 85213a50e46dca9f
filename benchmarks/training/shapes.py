"""Procedural pictures and videos of coloured, textured shapes, and captions that describe them.

A scene is what its caption describes; everything else (size, place, speed, the texture of the
background) is drawn at random. Colours are saturated and backgrounds grey, so that
``benchmarks.training.judge`` can detect a scene from its pixels.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

SHAPES = ("circle", "square", "triangle", "cross")
TEXTURES = ("plain", "striped", "checkered")
GROUNDS = {"dark": 0.35, "light": 0.65}  # a larger difference would drown out the things
COLOURS = {
    "red": (0.90, 0.10, 0.10),
    "green": (0.10, 0.75, 0.15),
    "blue": (0.15, 0.25, 0.95),
    "yellow": (0.95, 0.90, 0.10),
    "magenta": (0.90, 0.15, 0.85),
    "cyan": (0.10, 0.85, 0.90),
}
LAYOUTS = ("left of", "above")  # place of the first thing relative to the second
MOTIONS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}  # (x, y), y downwards

SHADE = 0.55  # brightness of the dark part of a texture
PERIOD = 1 / 6  # period of a texture, in picture heights
CLOUDS = 0.1  # contrast of a background; with more, models would learn mostly backgrounds
HELD_OUT_ONE_IN = 4


@dataclass(frozen=True)
class Thing:
    texture: str
    colour: str
    shape: str

    def __str__(self) -> str:
        return f"{self.texture} {self.colour} {self.shape}"


@dataclass(frozen=True)
class Scene:
    """One thing, two things in a ``layout``, or one thing in ``motion``; ``str`` is the caption."""

    things: tuple[Thing, ...]
    ground: str
    layout: str | None = None
    motion: str | None = None

    def __str__(self) -> str:
        between = f" {self.layout} " if self.layout else ""
        moving = f" moving {self.motion}" if self.motion else ""
        subject = between.join(f"a {thing}" for thing in self.things)
        return f"{subject}{moving} on a {self.ground} background"


def things() -> list[Thing]:
    return [Thing(*words) for words in itertools.product(TEXTURES, COLOURS, SHAPES)]


def pictures() -> list[Scene]:
    """Return every still scene: one thing, or two of different colours and shapes."""
    single = [Scene((thing,), ground) for thing in things() for ground in GROUNDS]
    pairs = [
        Scene((first, second), ground, layout=layout)
        for first, second in itertools.product(things(), repeat=2)
        if first.colour != second.colour and first.shape != second.shape
        for ground in GROUNDS
        for layout in LAYOUTS
    ]
    return single + pairs


def videos() -> list[Scene]:
    """Return every moving scene."""
    return [
        Scene((thing,), ground, motion=motion)
        for thing in things()
        for ground in GROUNDS
        for motion in MOTIONS
    ]


def words(scenes: Sequence[Scene]) -> list[str]:
    """Return every word of the captions, sorted."""
    return sorted({word for scene in scenes for word in str(scene).split()})


def split(scenes: Sequence[Scene]) -> tuple[list[Scene], list[Scene]]:
    """Split into scenes to train on and held-out scenes, whose captions training never sees.

    The split uses a checksum of the caption, so it is always the same.
    """
    train: list[Scene] = []
    held_out: list[Scene] = []
    for scene in scenes:
        out = zlib.crc32(str(scene).encode()) % HELD_OUT_ONE_IN == 0
        (held_out if out else train).append(scene)
    return train, held_out


def sample(scenes: Sequence[Scene], count: int, generator: torch.Generator) -> list[Scene]:
    """Draw ``count`` scenes with replacement; one-thing and two-thing ones are equally likely."""
    kinds = [[s for s in scenes if len(s.things) == number] for number in (1, 2)]
    kinds = [kind for kind in kinds if kind]
    drawn = torch.randint(1 << 30, (count, 2), generator=generator).tolist()
    return [(kind := kinds[a % len(kinds)])[b % len(kind)] for a, b in drawn]


def render(
    scenes: Sequence[Scene],
    *,
    height: int,
    width: int,
    frames: int = 1,
    generator: torch.Generator,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Draw each scene.

    Args:
        generator: A CPU generator for what captions leave open. The same numbers give the same
            scene on any device.

    Returns:
        (B, frames, 3, height, width) in 0…1.
    """
    # Coordinates are in picture heights from the centre; y points down.
    vertical = (torch.arange(height, device=device) + 0.5) / height - 0.5
    horizontal = ((torch.arange(width, device=device) + 0.5) - width / 2) / height
    canvas = _ground(scenes, height, width, generator, device)[:, None].expand(-1, frames, -1, -1)
    canvas = canvas[:, :, None].expand(-1, -1, 3, -1, -1)
    for layer in _layers(scenes, frames, width / height, generator):
        x = horizontal - layer.centre[..., 0, None, None].to(device)  # (B, T, 1, W)
        y = vertical[:, None] - layer.centre[..., 1, None, None].to(device)  # (B, T, H, 1)
        radius = layer.radius.to(device)[:, None, None, None]
        coverage = (0.5 - _distance(x, y, radius, layer.shape.to(device)) * height).clamp(0, 1)
        paint = layer.colour.to(device)[:, None, :, None, None]
        painted = paint * _shade(x, y, layer.texture.to(device))[:, :, None]
        canvas = torch.lerp(canvas, painted, coverage[:, :, None])
    return canvas.contiguous()


@dataclass(frozen=True)
class _Layer:
    """One thing of every scene: shape, texture and radius (B,), colour (B, 3), centre (B, T, 2).

    For a scene without this thing, the radius is far below zero, so that nothing is drawn.
    """

    shape: Tensor
    texture: Tensor
    colour: Tensor
    radius: Tensor
    centre: Tensor


def _layers(
    scenes: Sequence[Scene], frames: int, aspect: float, generator: torch.Generator
) -> list[_Layer]:
    layers = []
    for index in range(max(len(scene.things) for scene in scenes)):
        drawn = torch.rand(len(scenes), 4, generator=generator)
        shown = [scene.things[index] if index < len(scene.things) else None for scene in scenes]
        first = [thing or scene.things[0] for thing, scene in zip(shown, scenes, strict=True)]
        places = [
            _place(scene, index, frames, aspect, *numbers)
            for scene, numbers in zip(scenes, drawn.tolist(), strict=True)
        ]
        there = torch.tensor([thing is not None for thing in shown])
        layers.append(
            _Layer(
                shape=torch.tensor([SHAPES.index(thing.shape) for thing in first]),
                texture=torch.tensor([TEXTURES.index(thing.texture) for thing in first]),
                colour=torch.tensor([COLOURS[thing.colour] for thing in first]),
                radius=torch.where(there, torch.tensor([radius for radius, _ in places]), -9.0),
                centre=torch.stack([centre for _, centre in places]),
            )
        )
    return layers


def _place(
    scene: Scene, index: int, frames: int, aspect: float, a: float, b: float, c: float, d: float
) -> tuple[float, Tensor]:
    """Return a thing's radius, and its centre per frame (T, 2), from four numbers in 0…1."""
    time = torch.linspace(-0.5, 0.5, frames) if frames > 1 else torch.zeros(1)
    if scene.motion:
        radius = 0.16 + 0.04 * a
        direction = torch.tensor(MOTIONS[scene.motion], dtype=torch.float32)
        extent = (aspect if direction[0] else 1.0) / 2 - radius
        travel = extent * (1.4 + 0.4 * b)  # at most 2 · extent
        slack = extent - travel / 2
        along, across = slack * (2 * c - 1), 0.15 * (2 * d - 1)
        centre = along * direction.abs() + across * (1 - direction.abs())
        return radius, centre + time[:, None] * travel * direction
    if scene.layout:
        radius = 0.13 + 0.06 * a
        apart = (-0.25 if index == 0 else 0.25) + 0.05 * (2 * b - 1)
        across = 0.2 * (2 * c - 1)
        place = (apart * aspect, across) if scene.layout == "left of" else (across, apart)
        return radius, torch.tensor([place]).expand(frames, 2)
    radius = 0.18 + 0.12 * a
    reach = 0.45 - radius
    return radius, torch.tensor([[reach * (2 * b - 1), reach * (2 * c - 1)]]).expand(frames, 2)


def _distance(x: Tensor, y: Tensor, radius: Tensor, shape: Tensor) -> Tensor:
    """Return the signed distance (B, T, H, W) to the outline, negative inside, exact near it."""
    across, down = x.abs(), y.abs()
    arm = radius / 3
    bars = torch.minimum(
        torch.maximum(across - arm, down - radius), torch.maximum(across - radius, down - arm)
    )
    outlines = (
        (x.square() + y.square()).sqrt() - radius,
        torch.maximum(across, down) - radius,
        torch.maximum(y - radius, (2 * across - (y + radius)) / 5**0.5).expand_as(bars),
        bars,
    )
    chosen = shape[:, None, None, None]
    distance = outlines[0]
    for index, outline in enumerate(outlines[1:], start=1):
        distance = torch.where(chosen == index, outline, distance)
    return distance


def _shade(x: Tensor, y: Tensor, texture: Tensor) -> Tensor:
    """Return the brightness (B, T, H, W); a texture moves with its thing."""
    row, column = (torch.floor(2 * place / PERIOD) % 2 for place in (y, x))
    chosen = texture[:, None, None, None]
    striped = row.expand(*row.shape[:3], x.shape[3])
    dark = torch.where(chosen == TEXTURES.index("striped"), striped, (row + column) % 2)
    return torch.where(chosen == TEXTURES.index("plain"), 1.0, 1.0 - (1.0 - SHADE) * dark)


def _ground(
    scenes: Sequence[Scene],
    height: int,
    width: int,
    generator: torch.Generator,
    device: torch.device | str,
) -> Tensor:
    """Draw grey backgrounds (B, H, W): a level with soft clouds."""
    level = torch.tensor([GROUNDS[scene.ground] for scene in scenes], device=device)
    clouds = torch.rand(len(scenes), 1, 6, 6, generator=generator).to(device) - 0.5
    soft = F.interpolate(clouds, size=(height, width), mode="bicubic", align_corners=False)
    return (level[:, None, None] + CLOUDS * soft[:, 0]).clamp(0, 1)
