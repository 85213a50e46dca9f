"""Attempts to fool the judge of pictures: each part of a caption can fail on its own."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from benchmarks.training import judge, shapes
from benchmarks.training.shapes import Scene, Thing

MOVING = Scene((Thing("striped", "red", "circle"),), "dark", motion="right")
PAIR = Scene(
    (Thing("plain", "green", "square"), Thing("checkered", "blue", "triangle")),
    "light",
    layout="above",
)


def drawn(scene: Scene, *, frames: int) -> Tensor:
    """Return a drawn scene (T, 3, 128, 128) in 0…1."""
    generator = torch.Generator().manual_seed(0)
    return shapes.render([scene], height=128, width=128, frames=frames, generator=generator)[0]


def missed(scene: Scene, frames: Tensor) -> set[str]:
    return {part for part, holds in judge.score(scene, judge.watch(frames)).items() if not holds}


def with_thing(scene: Scene, **changes: str) -> Scene:
    return replace(scene, things=(replace(scene.things[0], **changes), *scene.things[1:]))


@pytest.mark.parametrize(
    ("scene", "caption", "part"),
    [
        (MOVING, with_thing(MOVING, colour="cyan"), {"colours", "shapes", "textures"}),
        (MOVING, with_thing(MOVING, shape="cross"), {"shapes"}),
        (MOVING, with_thing(MOVING, texture="plain"), {"textures"}),
        (MOVING, replace(MOVING, motion="left"), {"motion"}),
        (MOVING, replace(MOVING, motion="up"), {"motion"}),
        (MOVING, MOVING, set()),
        (PAIR, with_thing(PAIR, shape="circle"), {"shapes"}),
        (PAIR, replace(PAIR, layout="left of"), {"layout"}),
        (PAIR, replace(PAIR, things=PAIR.things[::-1]), {"layout"}),
        (PAIR, replace(PAIR, things=PAIR.things[:1], layout=None), {"colours"}),
        (PAIR, PAIR, set()),
    ],
)
def test_exactly_the_part_that_is_wrong_fails(scene: Scene, caption: Scene, part: set[str]) -> None:
    frames = drawn(scene, frames=5 if scene.motion else 1)
    assert missed(caption, frames) - {"all"} == part


def test_still_or_reversed_video_fails_the_motion() -> None:
    video = drawn(MOVING, frames=5)
    assert "motion" in missed(MOVING, video[:1].expand(5, -1, -1, -1))
    assert "motion" in missed(MOVING, video.flip(0))
    assert missed(replace(MOVING, motion="left"), video.flip(0)) == set()


def test_noise_fails_every_part() -> None:
    noise = torch.rand(1, 3, 128, 128, generator=torch.Generator().manual_seed(0))
    assert {"shapes", "textures", "all"} <= missed(PAIR, noise)


def test_a_soft_picture_is_still_read() -> None:
    soft = torch.nn.functional.avg_pool2d(drawn(PAIR, frames=1), 5, 1, 2)
    assert missed(PAIR, soft) == set()


def test_rates_are_shares_of_the_scenes_that_have_the_part() -> None:
    single = replace(PAIR, things=PAIR.things[:1], layout=None)
    scenes = [PAIR, single, replace(PAIR, layout="left of"), single]
    shown = [PAIR, single, PAIR, with_thing(single, colour="red")]
    watched = [judge.watch(drawn(scene, frames=1)) for scene in shown]
    assert judge.rates(scenes, watched) == {
        "colours": 0.75,
        "shapes": 0.75,
        "textures": 0.75,
        "layout": 0.5,
        "all": 0.5,
    }


def test_chance_never_judges_a_picture_by_its_own_caption() -> None:
    colours = list(shapes.COLOURS)[:5]
    scenes = [Scene((Thing("plain", colour, "circle"),), "dark") for colour in colours]
    watched = [judge.watch(drawn(scene, frames=1)) for scene in scenes]
    for seed in range(5):
        assert judge.chance(scenes, watched, seed=seed)["colours"] == 0.0
