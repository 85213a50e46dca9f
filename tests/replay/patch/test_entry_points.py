"""Kernels in models that do not call SDPA: accurate outputs, and fallbacks with reasons."""

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from replay import use_kernel, use_plan
from replay.patch.use_kernel import use_own
from tests.capture.hooks.entry_points.test_transformers import (
    TOKENS,
    language_model,
    use_flash_stand_in,
    with_flash,
)
from tests.factories import normal
from tests.flash_attn_stand_in import flash_attn_func

from .conftest import plan_of

GPT_OSS = {"sliding_window": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
MODELS: dict[str, Callable[[], Any]] = {
    "Llama eager": lambda: language_model("Llama", "eager"),
    "gpt-oss eager": lambda: language_model("GptOss", "eager", **GPT_OSS),
    "Gemma 2 eager": lambda: language_model("Gemma2", "eager", sliding_window=4),
    "Llama flex": lambda: language_model("Llama", "flex_attention"),
    "Mistral flash": lambda: with_flash(language_model("Mistral", "eager", sliding_window=4)),
}


@pytest.fixture(autouse=True)
def _flash(monkeypatch: pytest.MonkeyPatch) -> None:
    use_flash_stand_in(monkeypatch)


def logits(model: Any, **options: Any) -> Tensor:
    with torch.no_grad():
        output: Tensor = model(TOKENS, **options).logits
    return output


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
@torch.compiler.set_stance("force_eager")  # FlexAttention would compile C++
def test_kernel_runs_supported_calls(model: Callable[[], Any]) -> None:
    built = model()
    expected = logits(built)
    with use_kernel("eager") as swap:
        swapped = logits(built)
    assert torch.allclose(swapped, expected, atol=1e-5)
    assert (swap.hits, swap.fallbacks) == (2, {})
    assert {name: tally.hits for name, tally in swap.entry_points.items()} == {"transformers": 2}
    with use_own() as swap:
        assert torch.allclose(logits(built), expected, atol=1e-5)
    assert (swap.hits, swap.not_planned) == (0, 2)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("gpt-oss eager", "has no attention sinks"),
        ("Gemma 2 eager", "has no soft cap"),
        ("Mistral flash", "has no sliding window"),
    ],
)
def test_unsupported_calls_fall_back_with_the_reason(model: str, reason: str) -> None:
    built = MODELS[model]()
    expected = logits(built)
    with use_kernel("torch-math") as swap:
        assert torch.equal(logits(built), expected)
    assert (swap.hits, swap.fallbacks) == (0, {reason: 2})
    assert swap.entry_points["transformers"].fallbacks == {reason: 2}
    assert str(swap) == "\n".join(
        f"{name}: 0 calls, 2 fell back (2 × {reason})"
        for name in ("torch-math", "of these by transformers")
    )


@pytest.mark.parametrize("by", ["argument", "config"])
def test_attention_weights_are_the_models_own(by: str) -> None:
    model = MODELS["Llama eager"]()
    options = {"output_attentions": True} if by == "argument" else {}
    model.config.output_attentions = by == "config"
    with torch.no_grad():
        expected = model(TOKENS, **options).attentions
        with use_kernel("torch-math") as swap:
            weights = model(TOKENS, **options).attentions
    assert len(weights) == 2
    assert all(torch.equal(each, own) for each, own in zip(weights, expected, strict=True))
    assert swap.fallbacks == {"the model asks for attention weights": 2}


def test_a_paged_cache_is_written_once() -> None:
    class Cache:
        written = 0

        def update(self) -> None:
            self.written += 1

    def eager_attention_forward(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: None, **others: Any
    ) -> tuple[Tensor, None]:
        others["cache"].update()
        return query.transpose(1, 2), None

    cache, tensor = Cache(), normal(1, 2, 5, 8)
    with use_kernel("torch-math") as swap:
        attend = AttentionInterface().get_interface("eager", eager_attention_forward)
        attend(nn.Module(), tensor, tensor, tensor, None, cache=cache)
    assert cache.written == 1
    assert swap.fallbacks == {"a paged key/value cache": 1}


def test_plan_applies_to_any_entry_point() -> None:
    model = MODELS["Llama eager"]()
    expected = logits(model)
    with use_plan(plan_of(("model.layers.1.self_attn", "prefill", "eager")), model) as swap:
        assert torch.allclose(logits(model), expected, atol=1e-5)
    tally = swap.entry_points["transformers"]
    assert (swap.hits, swap.not_planned, tally.hits, tally.fallbacks) == (
        *(1, 1, 1),
        {"not in the plan": 1},
    )


def test_function_in_a_compiled_graph_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry point cannot be traced, so it must not break the graph."""
    library = ModuleType("flash_attn.flash_attn_interface")
    vars(library)["flash_attn_func"] = flash_attn_func
    monkeypatch.setitem(sys.modules, library.__name__, library)
    tensor = normal(1, 5, 2, 8)
    compiled = torch.compile(lambda each: flash_attn_func(each, each, each), fullgraph=True)
    unused = pytest.warns(UserWarning, match=r"1 × flash_attn_func in a compiled graph")
    with unused, use_kernel("torch-math") as swap:
        inside = compiled(tensor)
    assert swap.in_graphs == {"flash_attn_func": 1}
    assert str(swap) == "torch-math: 0 calls\nin compiled graphs, not answered: 1 × flash_attn_func"
    assert torch.allclose(inside, flash_attn_func(tensor, tensor, tensor), atol=1e-5)
