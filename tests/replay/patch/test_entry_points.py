"""Kernels in models that do not call SDPA: accurate outputs, and fallbacks with reasons."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from replay import use_kernel, use_plan
from tests.capture.hooks.entry_points import test_diffusers as via_diffusers
from tests.capture.hooks.entry_points import test_libraries as via_libraries
from tests.capture.hooks.entry_points.test_transformers import (
    TOKENS,
    flash_stand_in,
    language_model,
    with_flash,
)
from tests.factories import normal

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
    monkeypatch.setitem(AttentionInterface._global_mapping, "flash_attention_2", flash_stand_in)


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
    assert torch.equal(logits(built), expected)


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


def test_the_output_is_the_kernels(doubling: str, eightfold: str) -> None:
    built = MODELS["Llama eager"]()
    expected = logits(built)
    with use_kernel(eightfold) as swap:
        assert not torch.allclose(logits(built), expected, atol=1e-3)
    assert swap.hits == 2
    with use_kernel(doubling) as swap:  # takes no mask
        assert torch.equal(logits(built), expected)
    assert swap.fallbacks == {"no mask": 2}


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


@pytest.fixture
def _sage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace diffusers' `sage`, which needs a GPU, by plain PyTorch."""
    backend = via_diffusers.attention_dispatch.AttentionBackendName.SAGE
    registry = via_diffusers.attention_dispatch._AttentionBackendRegistry
    monkeypatch.setitem(registry._backends, backend, via_diffusers.mine)


@pytest.mark.usefixtures("_sage")
def test_kernel_replaces_each_of_diffusers_backends(eightfold: str) -> None:
    denoiser = via_diffusers.model()
    blocks = denoiser.transformer_blocks[0], denoiser.single_transformer_blocks[0]
    for block, backend in zip(blocks, ("sage", "flex"), strict=True):
        block.attn.processor._attention_backend = backend
    with torch.no_grad():
        expected = via_diffusers.step(denoiser)
        with use_kernel("torch-math") as swap:
            assert torch.allclose(via_diffusers.step(denoiser), expected, atol=1e-5)
        assert {name: tally.hits for name, tally in swap.entry_points.items()} == {"diffusers": 2}
        with use_kernel(eightfold):
            assert not torch.allclose(via_diffusers.step(denoiser), expected, atol=1e-3)
        assert torch.equal(via_diffusers.step(denoiser), expected)


def lse_too(q: Tensor, k: Tensor, v: Tensor, return_attn_probs: bool = False) -> Any:
    output = via_libraries.flash_attn_func(q, k, v)
    return (output, torch.zeros(1)) if return_attn_probs else output


@pytest.fixture
def _flash_attn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the library flash-attn, which needs a GPU."""
    library = ModuleType("flash_attn.flash_attn_interface")
    vars(library)["flash_attn_func"] = lse_too
    monkeypatch.setitem(sys.modules, library.__name__, library)


@pytest.mark.usefixtures("_flash_attn")
def test_log_sum_exp_comes_from_the_library() -> None:
    q, k = normal(2, 5, 4, 8), normal(2, 9, 2, 8, seed=1)
    with use_kernel("torch-math") as swap:
        output = lse_too(q, k, k)
        own, _ = lse_too(q, k, k, return_attn_probs=True)
    assert torch.allclose(output, own, atol=1e-5)
    assert (swap.hits, swap.fallbacks) == (1, {"the model asks for the log-sum-exp": 1})


@pytest.mark.usefixtures("_flash_attn")
def test_function_in_a_compiled_graph_is_not_replaced() -> None:
    """An entry point cannot be traced, so it must not break the graph."""
    tensor = normal(1, 5, 2, 8)
    compiled = torch.compile(lambda each: lse_too(each, each, each), fullgraph=True)
    with use_kernel("torch-math") as swap:
        inside = compiled(tensor)
    assert swap.in_graphs == {"lse_too": 1}
    assert str(swap) == "torch-math: 0 calls\nin compiled graphs, not answered: 1 × lse_too"
    assert torch.allclose(inside, lse_too(tensor, tensor, tensor), atol=1e-5)
