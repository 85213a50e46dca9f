"""ComfyUI's attention, with a stand-in, and with ComfyUI itself if COMFYUI_PATH is its checkout."""

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from capture import record
from replay import use_kernel
from tests.capture.hooks.entry_points import comfyui_stand_in
from tests.capture.hooks.entry_points.layers import Layer, recorded, refusal
from tests.factories import normal

ATTENTION = "comfy.ldm.modules.attention"
FUNCTIONS = ("attention_basic", "attention_sub_quad", "attention_split")


@pytest.fixture(scope="module")
def _source() -> Iterator[None]:
    """Make ComfyUI itself importable, on the CPU."""
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
    """Module of ComfyUI's attention functions, or of the stand-in."""
    if request.param == "source":
        request.getfixturevalue("_source")
        return importlib.import_module(ATTENTION)
    monkeypatch.setitem(sys.modules, ATTENTION, comfyui_stand_in)
    return comfyui_stand_in


def merged(seed: int, length: int) -> Tensor:
    """Return a random tensor (2, S, 3 · 8), whose heads and channels are merged."""
    return normal(2, length, 24, seed=seed)


def separate(seed: int, length: int) -> Tensor:
    """Return a random tensor (B, H, S, D) with the same sizes."""
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


def test_attention_pytorch_is_recorded_as_sdpa(comfyui: Any, tmp_path: Path) -> None:
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


def test_functions_are_restored(comfyui: Any, tmp_path: Path) -> None:
    function = comfyui.attention_sub_quad
    before = {each: each.__code__ for each in (function, function.__wrapped__)}
    layer = Layer(function)
    with record(layer, tmp_path / "calls"):
        layer(*tensors(merged), 3)
        assert all(each.__code__ is not code for each, code in before.items())
    assert comfyui.attention_sub_quad is function
    assert {each: each.__code__ for each in before} == before
    assert not [name for name in vars(comfyui) if "attention_replay" in name]
