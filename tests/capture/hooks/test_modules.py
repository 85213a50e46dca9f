"""A call's site names the module path, step and phase of the running forward pass."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

from capture.hooks.interceptor import intercept
from capture.hooks.modules import CallSite, ModuleTracker, roots_of
from tests.factories import tiny_llama

CALL = nn.Module._call_impl


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
    assert nn.Module._call_impl is CALL
    return sites


class Denoiser(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, states: Tensor, timestep: Tensor | None = None, kwargs: Any = None) -> Tensor:
        return self.inner(states)


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


class Loop(nn.Sequential):
    """Wrapper of a denoiser, which runs all steps in one forward pass."""

    def forward(self, states: Tensor) -> Tensor:
        for step in range(3):
            states = self[0](states, torch.tensor(step))
        return states


def test_each_root_counts_its_own_steps(make_layers: Callable[..., Any], states: Tensor) -> None:
    encoder, loop = make_layers(1), Loop(Denoiser(make_layers(1)))
    sites = sites_of({"encoder": encoder, "loop": loop}, lambda: loop(encoder(states)))
    assert [(site.module, site.step, site.phase) for site in sites] == [
        ("encoder.layers.0", 0, "encode"),
        *(("loop.0.inner.layers.0", step, "denoise") for step in range(3)),
    ]


@pytest.mark.parametrize("options", [{}, {"cache_implementation": "static"}, {"use_cache": False}])
def test_generation_decodes_after_the_prefill_with_a_cache(options: dict[str, Any]) -> None:
    model, tokens = tiny_llama(), torch.arange(5)[None] + 2
    options |= {"max_new_tokens": 3, "min_new_tokens": 3, "pad_token_id": 0}
    sites = sites_of({"": model}, lambda: model.generate(tokens, **options))
    later = "decode" if options.get("use_cache", True) else "prefill"
    assert [(site.module, site.step, site.phase) for site in sites] == [
        (f"model.layers.{layer}.self_attn", step, phase)
        for step, phase in enumerate(["prefill", later, later])
        for layer in (0, 1)
    ]


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


def test_module_used_twice_keeps_its_first_path(make_layers: Any, states: Tensor) -> None:
    model = make_layers(1)
    model.layers.append(model.layers[0])
    sites = sites_of({"": model}, lambda: model(states))
    assert [site.module for site in sites] == ["layers.0", "layers.0"]


@pytest.mark.parametrize("which", ["whole", "layer", "in place"])
def test_compiled_modules_keep_their_names(layers: Any, states: Tensor, which: str) -> None:
    torch._dynamo.reset()
    model = Denoiser(layers)
    if which == "whole":
        model = torch.compile(model, backend="eager")
    elif which == "layer":
        layers.layers[0] = torch.compile(layers.layers[0], backend="eager")
    else:
        model.compile(backend="eager")
    model(states)
    sites = sites_of({"": model}, lambda: model(states, 1))
    names = ["inner.layers.0", "inner.layers.1"]
    assert [(site.module, site.phase) for site in sites] == [(name, "denoise") for name in names]


def test_module_compiled_inside_the_block_is_compiled_like_others(
    make_layers: Any, states: Tensor
) -> None:
    torch._dynamo.reset()
    compiler, inside, outside = CompileCounter(), make_layers(1), make_layers(1)
    tracker = ModuleTracker({"": inside})
    with tracker.watch():
        inside.compile(backend=compiler)
    outside.compile(backend=compiler)
    outside(states), inside(states)
    assert compiler.frame_count == 1  # PyTorch compiles `forward` once for both
    assert not tracker.may_have_run


def test_torchscript_is_made_and_followed_inside_the_block() -> None:
    linear = nn.Linear(2, 2)
    for module in (linear, torch.jit.script(linear)):
        tracker = ModuleTracker({"": module})
        with tracker.watch():
            torch.jit.script(linear)
            module(torch.ones(2))
        assert tracker.may_have_run


def test_data_parallel_replica_is_named_like_its_original(layers: Any, states: Tensor) -> None:
    def run() -> None:
        # DataParallel runs shallow copies, which are made during the forward pass.
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
