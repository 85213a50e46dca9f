"""A call's site names the module path, step and phase of the running forward pass."""

import threading
import weakref
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
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
    """Denoiser that calls its inner module without `_call_impl`."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, states: Tensor, timestep: Tensor | None = None, kwargs: Any = None) -> Tensor:
        return self.inner.forward(states)


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
        for _ in range(2):
            with pytest.raises(RuntimeError, match="mat1 and mat2"):
                layers(states[..., :3])
        layers(states)

    sites = sites_of({"": layers}, run)
    # The two failed forward passes of the root count as steps.
    assert [(site.module, site.step) for site in sites] == [("layers.0", 2), ("layers.1", 2)]


class Attend(nn.Module):
    def forward(self, states: Tensor) -> Tensor:
        query = states.clone()
        held = weakref.ref(query)
        output = nn.functional.scaled_dot_product_attention(query, query, query)
        del query
        assert held() is None
        return output


class KeepsVariables(Denoiser):
    def forward(self, states: Tensor) -> Tensor:  # type: ignore[override]
        before = locals()
        output: Tensor = self.inner.forward(states)
        assert before["states"] is states
        return output


def test_module_called_as_forward_has_its_name_and_its_variables(states: Tensor) -> None:
    model = Denoiser(KeepsVariables(nn.Identity()))
    vars(model.inner)["inner"] = Attend()  # not part of the model
    model.twin = model.inner  # keeps its first path

    def run() -> None:
        model(states, 3)
        model(states, timestep=torch.tensor(2))
        model(states, timestep=None, kwargs="not a mapping")
        model.forward(states, 1)

    phases = ["denoise", "denoise", "encode"]
    assert sites_of({"": model}, run) == [
        *(CallSite("inner", step, phase, step) for step, phase in enumerate(phases)),
        CallSite("inner"),
    ]


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
    paths: dict[int, list[str]] = defaultdict(list)
    # Both threads wait for each other inside attention, so that their calls always overlap.
    together = threading.Barrier(2, timeout=30)

    def handler(arguments: Any, proceed: Callable[[], Tensor], sdpa: Any) -> Tensor:
        together.wait()
        paths[threading.get_ident()].append(tracker.site.module)
        together.wait()
        return proceed()

    with tracker.watch(), intercept(handler), ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda model: [model(states), model(states)], models.values()))
    assert sorted(paths.values()) == [
        [f"{name}.layers.{index}" for index in range(3)] * 2 for name in models
    ]


def test_roots_are_a_module_a_pipeline_s_modules_or_a_mapping(layers: nn.Module) -> None:
    class Pipeline:
        components = {"transformer": layers, "tokenizer": object(), "vae": None}  # noqa: RUF012

    assert roots_of(layers) == {"": layers}
    assert roots_of({"a": layers}) == {"a": layers}
    assert roots_of(Pipeline()) == {"transformer": layers}
    for nothing in (3, {}, "model"):
        with pytest.raises(TypeError, match=r"pass a torch\.nn.Module, a diffusers pipeline"):
            roots_of(nothing)
