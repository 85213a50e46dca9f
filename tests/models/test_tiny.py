"""The built-in tiny models have real classes, real head dimensions and whole pipelines."""

import json
import math
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from huggingface_hub import HfApi

import models
from benchmarks.training import judge, shapes
from models import pretrained_weights

Tiny = Callable[[str], models.Runnable]
Calls = list[tuple[torch.Tensor, torch.Tensor]]

TRAINED = [name for name in models.NAMES if pretrained_weights.directory(name)]
UNTRAINED = [name for name in models.NAMES if name not in TRAINED]


def slow_videos(names: Iterable[str]) -> list[Any]:
    slow = pytest.mark.slow
    return [pytest.param(name, marks=slow if "video" in name else ()) for name in names]


def output(result: Any) -> torch.Tensor:
    for name in ("frames", "images", "sequences"):
        if name in result:
            return torch.as_tensor(result[name])
    raise AssertionError(f"no output in {type(result).__name__}")


def parameters(runnable: models.Runnable) -> torch.Tensor:
    return torch.cat([p.flatten() for root in runnable.roots.values() for p in root.parameters()])


@dataclass
class Run:
    """Outputs of one whole inference, with the query and key of every attention call."""

    runnable: models.Runnable
    output: torch.Tensor
    calls: Calls


@pytest.fixture(scope="module")
def first_run(tiny: Tiny) -> Callable[..., Run]:
    """`first_run(name, …)` returns the first run of a tiny model with default or random weights."""
    runs: dict[tuple[str, str | None], Run] = {}

    def get(name: str, weights: str | None = None) -> Run:
        if (name, weights) not in runs:
            runnable = tiny(name)
            if weights is not None:
                steps = runnable.settings["steps"]
                given = {"size": "tiny", "weights": weights, "device": "cpu"}
                runnable = models.load(name, **given, steps=steps)
            with recorded_calls() as calls:
                runs[name, weights] = Run(runnable, output(runnable.run()), calls)
        return runs[name, weights]

    return get


@contextmanager
def recorded_calls() -> Iterator[Calls]:
    """Record query and key of every scaled_dot_product_attention call within the block."""
    calls: Calls = []
    original = F.scaled_dot_product_attention

    def recorder(query: Any, key: Any, value: Any, *rest: Any, **named: Any) -> torch.Tensor:
        calls.append((query.clone(), key.clone()))
        return original(query, key, value, *rest, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", recorder)
        yield calls


@pytest.mark.parametrize("name", slow_videos(models.NAMES))
def test_a_second_run_repeats_the_first_and_nothing_is_printed(
    first_run: Callable[..., Run], capfd: pytest.CaptureFixture[str], name: str
) -> None:
    first = first_run(name)
    second = output(first.runnable.run())
    assert torch.equal(first.output, second)
    assert second.isfinite().all()
    assert second.float().std() > 0.01
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("name", models.NAMES)
def test_runnable_describes_itself(tiny: Tiny, name: str) -> None:
    runnable = tiny(name)
    assert runnable.name == name
    assert runnable.weights == (
        f"built-in, trained; model card models/pretrained/{name}/README.md"
        if name in TRAINED
        else "random, seed 0 (built-in tiny configuration)"
    )
    settings = json.loads(json.dumps(runnable.settings))
    assert settings["size"] == "tiny"
    assert settings["weights"] == ("pretrained" if name in TRAINED else "random")
    assert settings["dtype"] == "float32"
    assert settings["device"] == "cpu"
    assert settings["prompt"]
    assert not any(module.training for root in runnable.roots.values() for module in root.modules())


# Tuples of (batch, heads, queries, head dim) and (batch, key/value heads, keys, head dim).
T5 = ((1, 2, 64, 64), (1, 2, 64, 64))
CLIP = ((1, 2, 77, 32), (1, 2, 77, 32))
UNTRAINED_CALLS = {
    "cogvideo": {
        T5: 2 * 2,  # layers × (prompt and empty prompt)
        ((2, 4, 64 + 3 * 12 * 16, 64),) * 2: 4 * 2,  # layers × steps
    },
    "flux": {
        T5: 2,
        CLIP: 2,
        ((1, 2, 64 + 20 * 20, 128),) * 2: (2 + 4) * 2,  # (double + single blocks) × steps
        ((1, 1, 40 * 40, 32),) * 2: 1,  # the middle of the VAE's decoder
    },
    "llama": {
        ((1, 4, 384, 128), (1, 2, 384, 128)): 4,
        # The prefill gives the first of eight new tokens, and each decoding step another.
        **{((1, 4, 1, 128), (1, 2, 384 + token, 128)): 4 for token in range(1, 8)},
    },
}
TRAINED_CALLS = {
    "cogvideo": {T5: 2 * 2, ((2, 3, 64 + 5 * 20 * 24, 64),) * 2: 4 * 2},
    "flux": {
        T5: 2,
        CLIP: 2,
        ((1, 2, 64 + 32 * 32, 128),) * 2: (1 + 2) * 2,
        ((1, 1, 64 * 64, 32),) * 2: 1,
    },
    "llama": {
        ((1, 4, 1024, 128), (1, 2, 1024, 128)): 4,
        **{((1, 4, 1, 128), (1, 2, 1024 + token, 128)): 4 for token in range(1, 8)},
    },
}


def sizes(calls: Calls) -> dict[Any, int]:
    return dict(Counter((tuple(query.shape), tuple(key.shape)) for query, key in calls))


def mean_entropy(calls: Calls, *, causal: bool) -> float:
    """Return the entropy of the largest calls' attention weights, relative to uniform weights."""
    most = max(query.shape[2] * query.shape[3] for query, _ in calls)
    found = []
    for query, key in calls:
        if query.shape[2] * query.shape[3] != most:
            continue
        rows = torch.arange(query.shape[2] // 4, query.shape[2], 37)
        key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        scores = query[:, :, rows] @ key.mT / math.sqrt(query.shape[3])
        valid = torch.full((len(rows),), key.shape[2])
        if causal:
            scores = scores.masked_fill(torch.arange(key.shape[2]) > rows[:, None], -math.inf)
            valid = rows + 1
        entropy = torch.special.entr(scores.softmax(-1)).sum(-1) / valid.log()
        found.append(float(entropy.mean()))
    return sum(found) / len(found)


@pytest.mark.parametrize("name", slow_videos(UNTRAINED))
def test_untrained_attention_is_not_extreme(first_run: Callable[..., Run], name: str) -> None:
    calls = first_run(name).calls
    assert sizes(calls) == UNTRAINED_CALLS[name.partition("-")[0]]
    assert 0.3 < mean_entropy(calls, causal=name.startswith("llama")) < 0.99


@pytest.mark.parametrize("name", slow_videos(TRAINED))
def test_trained_attention_has_more_structure(first_run: Callable[..., Run], name: str) -> None:
    trained, drawn = first_run(name), first_run(name, "random")
    assert drawn.runnable.weights == (
        f"random, seed 0 (built-in configuration of the trained {name})"
    )
    assert sizes(trained.calls) == sizes(drawn.calls) == TRAINED_CALLS[name]
    causal = name == "llama"
    assert (
        mean_entropy(trained.calls, causal=causal) < mean_entropy(drawn.calls, causal=causal) - 0.05
    )


@pytest.mark.parametrize("name", TRAINED)
def test_trained_weights_load_without_a_network(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def refuse(*_: Any, **__: Any) -> None:
        asked.append("for the network")
        raise OSError("there is no network")

    monkeypatch.setattr(HfApi, "model_info", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    runnable = models.load(name, size="tiny", device="cpu", steps=1)
    assert runnable.settings["weights"] == "pretrained"
    assert asked == []


def test_the_trained_language_model_knows_python() -> None:
    runnable = models.load("llama", size="tiny", device="cpu", steps=1)
    language, directory = runnable.language, pretrained_weights.directory("llama")
    text = (directory / "held_out.txt").read_text(encoding="utf-8")
    ids, *others = language.windows(text)
    assert {len(window[0]) for window in others} == {len(ids[0])} == {1152}
    assert text.startswith("".join(map(language.decode, (ids, *others))))
    logits = language.score(ids)[:-1].float()
    perplexity = torch.nn.functional.cross_entropy(logits, ids[0, 1 : len(logits) + 1]).exp()
    assert 2 < perplexity < 10  # a uniform guess among the tokens would have 2,048


def test_more_tokens_than_trained_positions_are_refused() -> None:
    with pytest.raises(models.ModelError, match=r"2,001 tokens .* exceed the 1,152 positions"):
        models.load("llama", size="tiny", device="cpu", steps=2000)
    with pytest.raises(models.ModelError, match="use fewer --steps or a shorter --prompt"):
        models.load("llama", size="tiny", device="cpu", prompt="return " * 2000)
    with pytest.raises(models.ModelError, match=r"2,001 tokens, but llama reads at most 1,144"):
        models.load("llama", size="tiny", device="cpu").for_prompt("return " * 2000)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "whole"), [("flux", "images"), ("cogvideo", "frames")])
def test_trained_model_draws_its_caption(name: str, whole: str) -> None:
    runnable = models.load(name, size="tiny", device="cpu")
    frames = runnable.outputs(runnable.run()).tensors[whole]
    caption = str(runnable.settings["prompt"])
    (scene,) = [each for each in (*shapes.pictures(), *shapes.videos()) if str(each) == caption]
    rates = judge.rates([scene], [judge.watch(frames)])
    told = "layout" if name == "flux" else "motion"
    assert rates["colours"] == rates[told] == 1


def test_all_trained_weights_are_small() -> None:
    files = [path for path in pretrained_weights.ROOT.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 24e6


@pytest.mark.parametrize("name", ["llama", "llama-3.1-8b"])
def test_seed_determines_random_weights(name: str) -> None:
    first, same, different = (
        parameters(models.load(name, size="tiny", weights="random", device="cpu", seed=seed))
        for seed in (0, 0, 1)
    )
    assert torch.equal(first, same)
    assert not torch.equal(first, different)


def test_building_and_running_leave_the_global_generator_alone() -> None:
    torch.manual_seed(7)
    state = torch.get_rng_state()
    models.load("llama-3.1-8b", size="tiny", device="cpu", steps=1).run()
    models.load("flux", size="tiny", weights="random", device="cpu", steps=1)
    assert torch.equal(torch.get_rng_state(), state)


def test_steps_prompt_and_dtype_are_used() -> None:
    runnable = models.load(
        "llama-3.1-8b", size="tiny", device="cpu", steps=3, prompt="twelve bytes", dtype="bfloat16"
    )
    assert output(runnable.run()).shape == (1, 12 + 3)
    assert output(runnable.for_prompt("a fox")()).shape == (1, 5 + 3)
    assert runnable.settings["prompt"] == "twelve bytes"
    assert runnable.settings["prompt_tokens"] == 12
    assert {parameter.dtype for parameter in runnable.roots[""].parameters()} == {torch.bfloat16}
    buffers = dict(runnable.roots[""].named_buffers())
    assert buffers["model.rotary_emb.inv_freq"].dtype == torch.float32
