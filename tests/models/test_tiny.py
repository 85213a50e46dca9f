"""The built-in tiny models: real classes, real head dimensions, whole pipelines."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

import models

Tiny = Callable[[str], models.Runnable]
Calls = list[tuple[torch.Tensor, torch.Tensor]]


def output(result: Any) -> torch.Tensor:
    for name in ("frames", "images", "sequences"):
        if name in result:
            return torch.as_tensor(result[name])
    raise AssertionError(f"no output in {type(result).__name__}")


@pytest.mark.parametrize("name", models.NAMES)
def test_two_runs_are_equal_and_finite(tiny: Tiny, name: str) -> None:
    runnable = tiny(name)
    first, second = output(runnable.run()), output(runnable.run())
    assert torch.equal(first, second)
    assert first.isfinite().all()
    assert first.float().std() > 0.01


@pytest.mark.parametrize("name", models.NAMES)
def test_runnable_describes_itself(tiny: Tiny, name: str) -> None:
    runnable = tiny(name)
    assert runnable.name == name
    assert runnable.weights == "random, seed 0 (built-in tiny configuration)"
    settings = json.loads(json.dumps(runnable.settings))
    assert settings["size"] == "tiny"
    assert settings["dtype"] == "float32"
    assert settings["device"] == "cpu"
    assert settings["prompt"]
    assert not any(module.training for root in runnable.roots.values() for module in root.modules())


# (batch, heads, queries, head dim), (batch, key/value heads, keys, head dim) → calls.
T5 = ((1, 2, 64, 64), (1, 2, 64, 64))
COGVIDEO = {
    T5: 2 * 2,  # layers × (prompt, empty prompt)
    ((2, 4, 64 + 3 * 12 * 16, 64),) * 2: 4 * 4,  # layers × steps
}
FLUX = {
    T5: 2,
    ((1, 2, 77, 32),) * 2: 2,  # CLIP
    ((1, 2, 64 + 20 * 20, 128),) * 2: (2 + 4) * 4,  # (double + single blocks) × steps
    ((1, 1, 40 * 40, 32),) * 2: 1,  # the middle of the VAE's decoder
}
LLAMA = {
    ((1, 4, 384, 128), (1, 2, 384, 128)): 4,
    # The prefill gives the first of eight new tokens.
    **{((1, 4, 1, 128), (1, 2, 384 + token, 128)): 4 for token in range(1, 8)},
}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("cogvideo", COGVIDEO),
        ("cogvideo-5b", COGVIDEO),
        ("flux", FLUX),
        ("flux-schnell", FLUX),
        ("llama", LLAMA),
        ("llama-3.1-8b", LLAMA),
    ],
)
def test_every_attention_call_of_the_pipeline(
    tiny: Tiny, attention_calls: Calls, name: str, expected: dict[Any, int]
) -> None:
    tiny(name).run()
    seen = Counter((tuple(query.shape), tuple(key.shape)) for query, key in attention_calls)
    assert dict(seen) == expected


@pytest.mark.parametrize(("name", "head_dim"), [("cogvideo", 64), ("flux", 128), ("llama", 128)])
def test_attention_is_neither_uniform_nor_one_hot(
    tiny: Tiny, attention_calls: Calls, name: str, head_dim: int
) -> None:
    tiny(name).run()
    most_queries = max(query.shape[2] for query, _ in attention_calls if query.shape[3] == head_dim)
    for query, key in attention_calls:
        if query.shape[2:] != (most_queries, head_dim):
            continue
        key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        weights = (query @ key.mT / math.sqrt(head_dim)).softmax(-1)
        entropy = torch.special.entr(weights).sum(-1).mean() / math.log(key.shape[2])
        assert 0.3 < entropy < 0.99


def test_the_seed_decides_the_weights(tiny: Tiny) -> None:
    again = models.load("llama", size="tiny", device="cpu")
    other = models.load("llama", size="tiny", device="cpu", seed=1)
    first, same, different = (
        torch.cat([parameter.flatten() for parameter in runnable.roots[""].parameters()])
        for runnable in (tiny("llama"), again, other)
    )
    assert torch.equal(first, same)
    assert not torch.equal(first, different)


def test_building_and_running_leave_the_global_generator_alone() -> None:
    torch.manual_seed(7)
    state = torch.get_rng_state()
    models.load("flux", size="tiny", device="cpu", steps=1).run()
    assert torch.equal(torch.get_rng_state(), state)


def test_steps_prompt_and_dtype_are_heeded() -> None:
    runnable = models.load(
        "llama", size="tiny", device="cpu", steps=3, prompt="twelve bytes", dtype="bfloat16"
    )
    assert output(runnable.run()).shape == (1, 12 + 3)
    assert runnable.settings["prompt"] == "twelve bytes"
    assert runnable.settings["prompt_tokens"] == 12
    assert {parameter.dtype for parameter in runnable.roots[""].parameters()} == {torch.bfloat16}
    buffers = dict(runnable.roots[""].named_buffers())
    assert buffers["model.rotary_emb.inv_freq"].dtype == torch.float32


def test_nothing_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    models.load("cogvideo", size="tiny", device="cpu", steps=1).run()
    assert capfd.readouterr() == ("", "")
