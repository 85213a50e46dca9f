"""ComfyUI's attention: a stand-in, and ComfyUI itself if COMFYUI_PATH names its checkout."""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from capture import AttentionCall, load, record
from capture.errors import RecordingWarning
from replay import use_kernel
from replay.accuracy.reference import attention
from tests.capture.hooks.entry_points import comfyui_stand_in
from tests.factories import normal

PAGE = Path(__file__).resolve().parents[4] / "docs" / "recording.md"
ATTENTION = "comfy.ldm.modules.attention"
VAE = "comfy.ldm.modules.diffusionmodules.model"
FUNCTIONS = ("attention_basic", "attention_sub_quad", "attention_split")


@pytest.fixture(scope="module")
def _source() -> Iterator[None]:
    """ComfyUI itself, importable, on the CPU."""
    path = os.environ.get("COMFYUI_PATH")
    if not path:
        pytest.skip("COMFYUI_PATH names no checkout of ComfyUI")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(path)
        importlib.import_module("comfy.cli_args").args.cpu = True
        yield
        for name in [name for name in sys.modules if name.partition(".")[0] == "comfy"]:
            del sys.modules[name]


@pytest.fixture(params=["stand-in", "source"])
def comfyui(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of attention functions."""
    if request.param == "source":
        request.getfixturevalue("_source")
        importlib.import_module(VAE)
        return importlib.import_module(ATTENTION)
    monkeypatch.setitem(sys.modules, ATTENTION, comfyui_stand_in)
    monkeypatch.setitem(sys.modules, VAE, comfyui_stand_in)
    return comfyui_stand_in


class Layer(nn.Module):
    """Layer that holds the function itself, not a module's attribute."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.held = {"attend": function}

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.held["attend"](*args, **kwargs)


def recorded(layer: Layer, out: Path, *args: Any, **kwargs: Any) -> AttentionCall:
    expected = layer(*args, **kwargs)
    with record(layer, out) as recording:
        assert torch.equal(layer(*args, **kwargs), expected)
    assert torch.equal(layer(*args, **kwargs), expected)
    assert (recording.seen, recording.problems) == (1, [])
    (call,) = load(out)
    assert call.output is not None
    assert torch.allclose(attention(call), call.output.double(), atol=1e-5)
    return call


def refusal(layer: Layer, out: Path, *args: Any, **kwargs: Any) -> str:
    with pytest.warns(RecordingWarning) as told, record(layer, out) as recording:
        layer(*args, **kwargs)
    assert (recording.seen, recording.kept) == (1, 0)
    (signature,) = recording.census.to_json()["signatures"]
    reason = str(signature["refusal"])
    assert f"none of 1 attention call can be stored: {reason}" in str(told[0].message)
    return reason


def merged(seed: int, length: int) -> Tensor:
    """Return (2, S, 3 · 8), with heads and channels merged."""
    return normal(2, length, 24, seed=seed)


def separate(seed: int, length: int) -> Tensor:
    """Return BHSD with the same sizes."""
    return normal(2, 3, length, 8, seed=seed)


FORMS = [
    (merged, {}),
    (merged, {"skip_output_reshape": True}),
    (separate, {"skip_reshape": True}),
    (separate, {"skip_reshape": True, "skip_output_reshape": True}),
]


def tensors(make: Callable[[int, int], Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    return make(0, 5), make(1, 7), make(2, 7)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize(("make", "options"), FORMS)
def test_each_form_of_tensors_is_recorded(
    name: str, make: Any, options: dict[str, Any], comfyui: Any, tmp_path: Path
) -> None:
    layer = Layer(getattr(comfyui, name))
    call = recorded(layer, tmp_path / "calls", *tensors(make), 3, **options)
    assert call.shape == (2, 3, 3, 5, 7, 8, 8)
    assert call.origin.entry_point == "comfyui"
    assert call.origin.backend == f"comfyui.{name.removeprefix('attention_')}"


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("shape", [(5, 7), (2, 5, 7), (2, 3, 5, 7), (2, 1, 1, 7)])
def test_each_form_of_a_mask_is_recorded(
    name: str, shape: tuple[int, ...], comfyui: Any, tmp_path: Path
) -> None:
    layer = Layer(getattr(comfyui, name))
    mask = normal(*shape, seed=3)
    call = recorded(layer, tmp_path / "calls", *tensors(merged), 3, mask)
    assert call.attn_mask is not None


def test_bool_mask_of_attention_basic_is_one_of_keys(comfyui: Any, tmp_path: Path) -> None:
    mask = torch.ones(2, 7, dtype=torch.bool)
    mask[1, 4:] = False
    layer = Layer(comfyui.attention_basic)
    call = recorded(layer, tmp_path / "calls", *tensors(merged), 3, mask=mask)
    assert call.attn_mask is not None
    assert call.attn_mask.shape == (2, 1, 1, 7)


@pytest.mark.parametrize("name", FUNCTIONS[1:])
def test_bool_mask_that_is_added_is_refused(name: str, comfyui: Any, tmp_path: Path) -> None:
    mask = torch.ones(5, 7, dtype=torch.bool)
    layer = Layer(getattr(comfyui, name))
    reason = refusal(layer, tmp_path / "calls", *tensors(merged), 3, mask=mask)
    assert reason == f"{name} adds a bool mask to the scores"


def test_what_is_pytorchs_own_is_left_to_sdpa(comfyui: Any, tmp_path: Path) -> None:
    layer = Layer(comfyui.attention_pytorch)
    mask = torch.ones(5, 7, dtype=torch.bool)
    call = recorded(layer, tmp_path / "calls", *tensors(merged), 3, mask=mask)
    assert call.origin.entry_point == "sdpa"


def test_override_that_hands_on_is_recorded_once(comfyui: Any, tmp_path: Path) -> None:
    def halve(function: Any, query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        output: Tensor = function(query / 2, *args, **kwargs)
        return output

    layer = Layer(comfyui.attention_sub_quad)
    query, key, value = tensors(separate)
    options = {"optimized_attention_override": halve}
    call = recorded(
        layer,
        tmp_path / "calls",
        *(query, key, value, 3),
        skip_reshape=True,
        skip_output_reshape=True,
        transformer_options=options,
    )
    assert torch.equal(call.query, query / 2)


def test_override_that_answers_by_itself_is_counted(comfyui: Any, tmp_path: Path) -> None:
    def sparse(function: Any, query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return query

    layer = Layer(comfyui.attention_pytorch)
    options = {"optimized_attention_override": sparse}
    reason = refusal(layer, tmp_path / "calls", *tensors(merged), 3, transformer_options=options)
    assert reason.startswith("the override ")
    assert reason.endswith("sparse")


def test_function_that_a_custom_node_registers(
    comfyui: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mine(q: Tensor, k: Tensor, v: Tensor, heads: int, **kwargs: Any) -> Tensor:
        output: Tensor = comfyui.attention_basic(q, k, v, heads, **kwargs)
        return output

    monkeypatch.setitem(comfyui.REGISTERED_ATTENTION_FUNCTIONS, "mine", mine)
    call = recorded(Layer(mine), tmp_path / "calls", *tensors(merged), 3)
    assert call.origin.backend == "comfyui.mine"


def test_scale_counts_where_it_is_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, ATTENTION, comfyui_stand_in)
    functions = {"ignored": comfyui_stand_in.attention_basic}
    functions["taken"] = comfyui_stand_in.attention_split
    calls = {
        name: recorded(Layer(function), tmp_path / name, *tensors(merged), 3, scale=0.1)
        for name, function in functions.items()
    }
    assert {name: call.scale for name, call in calls.items()} == {"ignored": None, "taken": 0.1}


def test_vaes_attention_is_recorded(comfyui: Any, tmp_path: Path) -> None:
    layer = Layer(sys.modules[VAE].normal_attention)
    images = [normal(2, 8, 3, 4, seed=seed) for seed in range(3)]
    call = recorded(layer, tmp_path / "calls", *images)
    assert call.shape == (2, 1, 1, 12, 12, 8, 8)
    with use_kernel("torch-math") as swap:
        swapped = layer(*images)
    assert torch.allclose(swapped, layer(*images), atol=1e-6)
    assert swap.hits == 1


@pytest.mark.parametrize("name", [*FUNCTIONS, "attention_pytorch"])
@pytest.mark.parametrize(("make", "options"), FORMS)
def test_kernel_answers_in_the_form_that_was_asked(
    name: str, make: Any, options: dict[str, Any], comfyui: Any
) -> None:
    layer = Layer(getattr(comfyui, name))
    expected = layer(*tensors(make), 3, **options)
    with use_kernel("torch-math") as swap:
        output = layer(*tensors(make), 3, **options)
    assert (output.shape, swap.hits, swap.fallbacks) == (expected.shape, 1, {})
    assert torch.allclose(output, expected, atol=1e-5)


def test_functions_are_themselves_again(comfyui: Any, tmp_path: Path) -> None:
    function = comfyui.attention_sub_quad
    before = {each: each.__code__ for each in (function, function.__wrapped__)}
    layer = Layer(function)
    with record(layer, tmp_path / "calls"):
        layer(*tensors(merged), 3)
        assert all(each.__code__ is not code for each, code in before.items())
    assert comfyui.attention_sub_quad is function
    assert {each: each.__code__ for each in before} == before
    assert not [name for name in vars(comfyui) if "attention_replay" in name]


@pytest.fixture
def denoisers(_source: None) -> dict[str, tuple[nn.Module, Callable[..., Tensor], list[str]]]:
    """Small random models by name, each with one step and the modules that call attention."""
    ops = importlib.import_module("comfy.ops").manual_cast
    torch.manual_seed(0)
    flux = importlib.import_module("comfy.ldm.flux.model").Flux(
        in_channels=4,
        out_channels=4,
        vec_in_dim=8,
        context_in_dim=16,
        hidden_size=32,
        mlp_ratio=2.0,
        num_heads=2,
        depth=1,
        depth_single_blocks=1,
        axes_dim=[4, 6, 6],
        theta=10000,
        patch_size=2,
        qkv_bias=True,
        guidance_embed=False,
        operations=ops,
    )
    unet = importlib.import_module("comfy.ldm.modules.diffusionmodules.openaimodel").UNetModel(
        **UNET, dtype=torch.float32, operations=ops
    )
    for model in (flux, unet):
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.1)
    image = normal(1, 4, 8, 8)
    context = normal(1, 5, 16, seed=1)

    def flux_step() -> Tensor:
        output: Tensor = flux(image, torch.tensor([0.5]), context, normal(1, 8, seed=2))
        return output

    def unet_step() -> Tensor:
        output: Tensor = unet(image, torch.tensor([5.0]), context)
        return output

    in_the_unet = ["input_blocks.1.1", "middle_block.1", "output_blocks.0.1", "output_blocks.1.1"]
    attentions = [f"{each}.transformer_blocks.0.attn{n}" for each in in_the_unet for n in (1, 2)]
    return {
        "flux": (flux, flux_step, ["double_blocks.0", "single_blocks.0"]),
        "unet": (unet, unet_step, attentions),
    }


UNET: dict[str, Any] = {
    "image_size": 8,
    "in_channels": 4,
    "out_channels": 4,
    "model_channels": 32,
    "num_res_blocks": [1],
    "channel_mult": [1],
    "num_heads": 2,
    "use_spatial_transformer": True,
    "transformer_depth": [1],
    "transformer_depth_output": [1, 1],
    "transformer_depth_middle": 1,
    "context_dim": 16,
    "legacy": False,
}


@pytest.mark.parametrize("name", [*FUNCTIONS, "attention_pytorch"])
@pytest.mark.parametrize("model", ["flux", "unet"])
def test_model_of_its_own(
    name: str, model: str, denoisers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    denoiser, step, modules = denoisers[model]
    function = getattr(importlib.import_module(ATTENTION), name)
    for module in (ATTENTION, "comfy.ldm.flux.math"):
        monkeypatch.setattr(importlib.import_module(module), "optimized_attention", function)
    with torch.inference_mode():
        expected = step()
        with record(denoiser, tmp_path / "calls", max=50) as recording:
            assert torch.equal(step(), expected)
        with use_kernel("torch-math") as swap:
            assert torch.allclose(step(), expected, atol=1e-4)
        assert torch.equal(step(), expected)
    calls = list(load(tmp_path / "calls"))
    assert recording.seen == len(calls) == len(modules) == swap.hits
    assert sorted(call.origin.module for call in calls) == sorted(modules)
    road = "sdpa" if name == "attention_pytorch" else "comfyui"
    assert {(call.origin.entry_point, call.origin.phase) for call in calls} == {(road, "denoise")}
    for call in calls:
        assert call.output is not None
        assert torch.allclose(attention(call), call.output.double(), atol=1e-5)


@pytest.mark.usefixtures("_source")
def test_nodes_of_the_page_around_its_own_sampler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        sample = importlib.import_module("comfy.sample").sample
        models = importlib.import_module("comfy.supported_models")
    except ImportError as error:
        pytest.skip(f"ComfyUI's sampler needs {error.name}")
    patcher = importlib.import_module("comfy.model_patcher").ModelPatcher
    config = models.SD15({**UNET, "dtype": torch.float32})
    base = config.get_model({}).eval()
    for parameter in base.parameters():
        nn.init.normal_(parameter, std=0.1)
    model = patcher(base, torch.device("cpu"), torch.device("cpu"))
    latent, conditioning = normal(1, 4, 8, 8), [[normal(1, 5, 16, seed=1), {}]]

    def sampled(model: Any) -> Tensor:
        with torch.inference_mode():
            output: Tensor = sample(
                model, latent, 2, 1.0, "euler", "normal", conditioning, conditioning, latent
            )
        return output

    expected = sampled(model)
    nodes = nodes_of_the_page()
    monkeypatch.chdir(tmp_path)
    (recording,) = nodes["RecordAttention"]().patch(model, out="calls", max=3)
    for _ in ("first", "over the first"):
        assert torch.equal(sampled(recording), expected)
        assert "kept of the eligible calls: 3 of 16" in capsys.readouterr().out
    calls = list(load("calls"))
    assert len(calls) == 3
    assert {call.origin.phase for call in calls} == {"denoise"}
    (swapping,) = nodes["UseAttentionKernel"]().patch(model, kernel="torch-math")
    assert torch.allclose(sampled(swapping), expected, atol=1e-4)
    assert "torch-math: 16 calls" in capsys.readouterr().out
    assert torch.equal(sampled(model), expected)


def nodes_of_the_page() -> dict[str, Any]:
    page = PAGE.read_text(encoding="utf-8")
    (code,) = re.findall(r'```python title="custom_nodes[^\n]*\n(.*?)```', page, re.DOTALL)
    namespace: dict[str, Any] = {}
    exec(code, namespace)
    nodes: dict[str, Any] = namespace["NODE_CLASS_MAPPINGS"]
    return nodes


@pytest.mark.parametrize(("name", "hits"), [("attention_pytorch", 1), ("attention_split", 0)])
def test_in_a_compiled_graph_only_sdpa_is_answered(name: str, hits: int, comfyui: Any) -> None:
    layer = Layer(getattr(comfyui, name))
    compiled = torch.compile(layer, backend="eager", fullgraph=name == "attention_pytorch")
    with use_kernel("torch-math") as swap:
        output = compiled(*tensors(merged), 3)
    assert swap.hits == hits
    assert torch.allclose(output, layer(*tensors(merged), 3), atol=1e-5)
    torch.compiler.reset()
