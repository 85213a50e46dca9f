"""Runs of the trained built-in models on data that was held out of their training."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import models
from benchmarks.training import shapes
from models import pretrained_weights

TEXT_TOKENS = 512

Run = Callable[[], Any]
"""Function that runs a model once, and returns what `replay.tune.outputs` can judge."""


def trained_runs(
    name: str,
    number: int,
    *,
    steps: int | None = None,
    dtype: str = "float32",
    device: str = "cpu",
    tokens: int = TEXT_TOKENS,
    arguments: dict[str, str] | None = None,
) -> tuple[models.Runnable, list[Run]]:
    """Return a trained model, and its runs on different prompts.

    A diffusion model draws held-out captions, each with the noise of another seed. A language model
    reads texts that do not overlap.

    Args:
        name: `cogvideo`, `flux` or `llama`.
        steps: number of denoising steps; None for the model's default.
        tokens: number of tokens of a text.
        arguments: arguments of the pipeline's call, as texts.

    Raises:
        ValueError: there are not as many held-out texts.
    """
    load = partial(models.load, name, size="tiny", device=device, dtype=dtype)
    if name == "llama":
        runnable = load()
        return runnable, _texts(runnable, number, tokens)
    scenes = shapes.split(shapes.videos() if name == "cogvideo" else shapes.pictures())[1]
    captions = random.Random(0).sample(scenes, number)
    loaded = [
        load(prompt=str(caption), seed=seed, steps=steps, arguments=arguments)
        for seed, caption in enumerate(captions)
    ]
    for other in loaded[1:]:
        other.pipeline.register_modules(**loaded[0].pipeline.components)
    return loaded[0], [each.run for each in loaded]


def _texts(runnable: models.Runnable, number: int, tokens: int) -> list[Run]:
    language, directory = runnable.language, pretrained_weights.directory("llama")
    assert language is not None
    assert language.tokenizer is not None
    assert language.score is not None
    assert directory is not None
    score = language.score
    text = (directory / "held_out.txt").read_text(encoding="utf-8")
    ids = torch.tensor([language.tokenizer(text)["input_ids"]])
    texts = ids.split(tokens, dim=1)[:number]
    if len(texts) < number or texts[-1].shape[1] < tokens:
        raise ValueError(f"the held-out text has fewer than {number} parts of {tokens} tokens")

    def read(ids: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"input_ids": ids, "logits": score(ids)[None]}

    return [partial(read, ids) for ids in texts]
