"""A call's site names the module path, step and phase of the running forward pass."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from capture.hooks.interceptor import intercept
from capture.hooks.modules import CallSite, ModuleTracker, roots_of
from tests.factories import tiny_llama


def sites_of(roots: dict[str, nn.Module], run: Callable[[], Any]) -> list[CallSite]:
    """Return the site of every SDPA call made by `run`."""
    tracker = ModuleTracker(roots)
    sites: list[CallSite] = []

    def handler(arguments: Any, proceed: Callable[[], Tensor], sdpa: Any) -> Tensor:
        sites.append(tracker.site)
        return proceed()

    with tracker.watch(), intercept(handler), torch.no_grad():
        run()
    assert tracker.site == CallSite()
    for root in roots.values():
        for module in root.modules():
            assert not module._forward_hooks
            assert not module._forward_pre_hooks
    return sites


class Denoiser(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, states: Tensor, timestep: Tensor | None = None, kwargs: Any = None) -> Tensor:
        return self.inner(states)


def test_root_that_calls_attention_itself_goes_by_its_class(layers: Any, states: Tensor) -> None:
    attention = layers.layers[0]
    assert sites_of({"": attention}, lambda: attention(states))[0].module == "Attention"


def test_call_outside_every_module_has_no_path(layers: nn.Module) -> None:
    query = torch.randn(1, 1, 2, 8)
    run = lambda: nn.functional.scaled_dot_product_attention(query, query, query)  # noqa: E731
    assert sites_of({"": layers}, run) == [CallSite("", 0, "encode")]


@pytest.mark.parametrize(
    ("run", "phase"),
    [
        (lambda model, states: model(states, torch.tensor(3)), "denoise"),
        (lambda model, states: model(states, timestep=torch.tensor(3)), "denoise"),
        (lambda model, states: model(states, timestep=None), "encode"),
        (lambda model, states: model(states, kwargs="not a mapping"), "encode"),
    ],
)
def test_timestep_means_denoising(
    layers: nn.Module, states: Tensor, run: Callable[..., Any], phase: str
) -> None:
    model = Denoiser(layers)
    assert {site.phase for site in sites_of({"": model}, lambda: run(model, states))} == {phase}


def test_each_root_counts_its_own_steps(make_layers: Callable[..., Any], states: Tensor) -> None:
    encoder, denoiser = make_layers(1), Denoiser(make_layers(1))

    def run() -> None:
        encoder(states)
        for timestep in range(3):
            denoiser(states, torch.tensor(timestep))

    sites = sites_of({"text_encoder": encoder, "transformer": denoiser}, run)
    assert [(site.module, site.step, site.phase) for site in sites] == [
        ("text_encoder.layers.0", 0, "encode"),
        ("transformer.inner.layers.0", 0, "denoise"),
        ("transformer.inner.layers.0", 1, "denoise"),
        ("transformer.inner.layers.0", 2, "denoise"),
    ]


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generation_is_prefill_then_decode(cache: str) -> None:
    model = tiny_llama()
    tokens = torch.arange(5)[None] + 2
    options: dict[str, Any] = {"cache_implementation": "static"} if cache == "static" else {}

    def run() -> None:
        model.generate(
            tokens, max_new_tokens=3, min_new_tokens=3, do_sample=False, pad_token_id=0, **options
        )

    sites = sites_of({"": model}, run)
    assert [(site.step, site.phase) for site in sites] == [
        (step, phase) for step, phase in enumerate(["prefill", "decode", "decode"]) for _ in "ab"
    ]
    assert {site.module for site in sites} == {
        "model.layers.0.self_attn",
        "model.layers.1.self_attn",
    }


def test_generation_without_a_cache_is_all_prefill() -> None:
    model = tiny_llama()
    tokens = torch.arange(5)[None] + 2

    def run() -> None:
        model.generate(tokens, max_new_tokens=3, min_new_tokens=3, use_cache=False, pad_token_id=0)

    assert {site.phase for site in sites_of({"": model}, run)} == {"prefill"}


def test_forward_that_raises_leaves_no_trace(layers: Any, states: Tensor) -> None:
    def run() -> None:
        with pytest.raises(RuntimeError, match="mat1 and mat2"):
            layers(states[..., :3])
        with pytest.raises(ZeroDivisionError):
            Denoiser(layers)(Explosive())
        layers(states)

    class Explosive:
        @property
        def shape(self) -> Any:
            raise ZeroDivisionError

    sites = sites_of({"": layers}, run)
    # The two failed forward passes of the root count as steps.
    assert [(site.module, site.step) for site in sites] == [("layers.0", 2), ("layers.1", 2)]


def test_module_that_was_entered_before_it_was_hooked_goes_on(layers: Any, states: Tensor) -> None:
    expected = layers(states)
    tracker, first = ModuleTracker({"": layers}), layers.layers[0]
    first.register_forward_hook(lambda *_: None)  # with a hook, PyTorch looks for hooks
    forward = first.forward
    with contextlib.ExitStack() as stack:

        def begins(states: Tensor) -> Any:
            stack.enter_context(tracker.watch())
            return forward(states)

        first.forward = begins
        assert torch.equal(layers(states), expected)
    assert tracker.site == CallSite()


def test_module_used_twice_keeps_its_first_path(make_layers: Any, states: Tensor) -> None:
    model = make_layers(1)
    model.layers.append(model.layers[0])
    sites = sites_of({"": model}, lambda: model(states))
    assert [site.module for site in sites] == ["layers.0", "layers.0"]


@pytest.mark.parametrize("which", ["whole", "layer", "in place"])
def test_compiled_modules_keep_their_names(layers: Any, states: Tensor, which: str) -> None:
    torch._dynamo.reset()
    model = layers
    if which == "whole":
        model = torch.compile(layers, backend="eager")
    elif which == "layer":
        layers.layers[0] = torch.compile(layers.layers[0], backend="eager")
    else:
        layers.compile(backend="eager")
    model(states)
    sites = sites_of({"": model}, lambda: model(states))
    assert [site.module for site in sites] == ["layers.0", "layers.1"]


def test_data_parallel_replica_is_named_like_its_original(layers: Any, states: Tensor) -> None:
    def run() -> None:
        # DataParallel runs shallow copies, which are made while the hooks are active.
        replica = layers.layers[1]._replicate_for_data_parallel()
        replica._modules = dict(layers.layers[1]._modules)
        replica(states)

    assert [site.module for site in sites_of({"": layers}, run)] == ["layers.1"]


def test_threads_do_not_mix_up_their_modules(make_layers: Any, states: Tensor) -> None:
    models = {"left": make_layers(3), "right": make_layers(3)}
    tracker = ModuleTracker(models)
    named: dict[str, list[str]] = {"left": [], "right": []}
    # Both threads wait for each other inside attention, so that their calls always overlap.
    together = threading.Barrier(2, timeout=30)

    def handler(arguments: Any, proceed: Callable[[], Tensor], sdpa: Any) -> Tensor:
        together.wait()
        named[threading.current_thread().name].append(tracker.site.module)
        together.wait()
        return proceed()

    with tracker.watch(), intercept(handler):
        threads = [
            threading.Thread(target=lambda model=model: [model(states), model(states)], name=name)
            for name, model in models.items()
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for name, paths in named.items():
        assert paths == [f"{name}.layers.{index}" for index in range(3)] * 2


def test_roots_are_a_module_a_pipeline_s_modules_or_a_mapping(layers: nn.Module) -> None:
    class Pipeline:
        components = {"transformer": layers, "tokenizer": object(), "vae": None}  # noqa: RUF012

    assert roots_of(layers) == {"": layers}
    assert roots_of({"a": layers}) == {"a": layers}
    assert roots_of(Pipeline()) == {"transformer": layers}
    for nothing in (3, {}, "model"):
        with pytest.raises(TypeError, match=r"pass a torch\.nn.Module, a diffusers pipeline"):
            roots_of(nothing)
