"""Captions match their pictures, according to a judge that sees only the pixels."""

import itertools
from typing import Any

import pytest
import torch

from benchmarks.training import judge, shapes
from benchmarks.training.shapes import Scene, Thing
from models.offline_tokenizers import clip_tokenizer, t5_tokenizer

ALL = {"pictures": shapes.pictures(), "videos": shapes.videos()}
CANVAS: dict[str, dict[str, Any]] = {
    "pictures": {"height": 128, "width": 128, "frames": 1},
    "videos": {"height": 80, "width": 96, "frames": 3},
}


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("kind", ALL)
def test_the_judge_reads_every_caption_back_and_no_exchanged_one(kind: str) -> None:
    scenes = shapes.sample(ALL[kind], 60, generator())
    drawn = shapes.render(scenes, **CANVAS[kind], generator=generator())
    watched = [judge.watch(frames) for frames in drawn]
    rates = judge.rates(scenes, watched)
    assert rates.pop("textures") >= 0.9  # textures lose detail at a quarter of the pixels
    rates.pop("all")
    assert set(rates.values()) == {1.0}
    by_chance = judge.chance(scenes, watched)
    assert by_chance["all"] <= 0.05
    assert by_chance["shapes"] <= 0.2


@pytest.mark.parametrize("kind", ALL)
def test_at_the_size_of_training_textures_are_read_back_too(kind: str) -> None:
    sides = {"pictures": (256, 256), "videos": (160, 192)}[kind]
    scenes = shapes.sample(ALL[kind], 24, generator(1))
    drawn = shapes.render(scenes, height=sides[0], width=sides[1], generator=generator(1))
    assert judge.rates(scenes, [judge.watch(frames) for frames in drawn])["textures"] == 1.0


def test_things_move_as_captioned() -> None:
    scenes = shapes.sample(shapes.videos(), 60, generator(2))
    drawn = shapes.render(scenes, **CANVAS["videos"], generator=generator(2))
    for scene, frames in zip(scenes, drawn, strict=True):
        first, last = judge.see(frames[0])[0], judge.see(frames[-1])[0]
        assert abs(first.area - last.area) < 0.1 * first.area
        moved = torch.tensor(last.centre) - torch.tensor(first.centre)
        along = torch.tensor(shapes.MOTIONS[str(scene.motion)], dtype=torch.float32)
        assert (moved * along).sum() > 0.25
        assert (moved * (1 - along.abs())).abs().sum() < 0.05


def test_a_caption() -> None:
    first, second = Thing("plain", "red", "circle"), Thing("striped", "blue", "cross")
    assert str(Scene((first,), "dark", motion="up")) == (
        "a plain red circle moving up on a dark background"
    )
    assert str(Scene((first, second), "light", layout="left of")) == (
        "a plain red circle left of a striped blue cross on a light background"
    )


def test_captions_are_unique_and_held_out_ones_are_never_trained_on() -> None:
    for scenes in ALL.values():
        train, held_out = shapes.split(scenes)
        assert len({str(scene) for scene in scenes}) == len(scenes)
        assert not {str(scene) for scene in train} & {str(scene) for scene in held_out}
        assert len(held_out) >= 100
        # Every word occurs in training.
        assert {w for s in train for w in str(s).split()} == {
            w for s in scenes for w in str(s).split()
        }


def test_the_same_numbers_give_the_same_scene() -> None:
    scenes = shapes.pictures()[:3]
    canvas = CANVAS["pictures"]
    first, second = (shapes.render(scenes, **canvas, generator=generator()) for _ in range(2))
    other = shapes.render(scenes, **canvas, generator=generator(1))
    assert torch.equal(first, second)
    assert not torch.equal(first, other)


def test_an_empty_picture_has_nothing_and_fails_every_caption() -> None:
    grey = torch.full((1, 3, 32, 32), 0.5)
    assert judge.see(grey[0]) == []
    assert not any(judge.score(shapes.pictures()[0], judge.watch(grey)).values())
    still = judge.watch(grey.expand(3, -1, -1, -1))
    assert not any(judge.score(shapes.videos()[0], still).values())


def test_each_word_of_a_caption_is_one_token_and_other_text_is_spelt() -> None:
    words = shapes.words(shapes.pictures() + shapes.videos())
    t5, clip = t5_tokenizer(words), clip_tokenizer(77, words)
    assert all(len(t5.tokenize(word)) == 1 for word in words)
    assert sum(len(clip.tokenize(word)) == 1 for word in words) >= len(words) - 2
    assert t5.decode(t5("Red, too?").input_ids, skip_special_tokens=True) == "Red, too?"
    longest = max((str(scene) for scene in itertools.chain(*ALL.values())), key=len)
    assert len(t5(longest).input_ids) <= 20
