"""The source of a kernel's call: run alone, it does what the kernel did."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from capture.call.attention_call import AttentionCall
from capture.hooks.interceptor import Arguments
from replay.isolation.inputs import aliases
from replay.kernels.layout import on_bshd
from replay.kernels.libraries import Library
from replay.kernels.registry import Kernel, find
from replay.kernels.wrapping import adapt
from replay.reproduce.plain_call import PlainCall, _traced, _Tracer
from tests.factories import normal, random_call

LIBRARY = Library(module="fast_attention", package="fast-attention", install="-")
CALL = random_call(q_heads=4, kv_heads=2, q_len=9, kv_len=9, is_causal=True)


class Planned:
    """A library's wrapper that is made first and run later."""

    def __init__(self, causal: bool) -> None:
        self.causal = causal

    def run(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, None]:
        inputs = (each.transpose(1, 2) for each in (query, key, value))
        output = scaled_dot_product_attention(*inputs, is_causal=self.causal, enable_gqa=True)
        return output.transpose(1, 2), None


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module: Any = ModuleType("fast_attention")
    module.Planned = Planned
    module.attention = lambda query, key, value, causal, scale: Planned(causal).run(
        query * scale, key, value
    )[0]
    monkeypatch.setitem(sys.modules, "fast_attention", module)
    from replay.kernels import libraries as library

    library._import.cache_clear()
    return module


def traced(kernel: Kernel, call: AttentionCall, directory: Path) -> PlainCall:
    arguments = aliases(call)
    names = {name: arguments.get(name) for name in call.tensors()}
    tracer = _Tracer(kernel.library, names, directory / "stored", lambda plain: None)
    with torch.no_grad():
        return _traced(kernel, kernel.name, arguments, tracer)


def answer(plain: PlainCall, call: AttentionCall, directory: Path) -> Tensor:
    """What the source gives on its own."""
    stored = directory / "stored"
    scope: dict[str, Any] = dict(call.tensors())
    scope["stored"] = load_file(stored) if stored.exists() else {}
    exec("import torch, torch.nn.attention\n" + "\n".join([*plain.imports, *plain.lines]), scope)
    output: Tensor = eval(plain.result, scope)
    return output


def plan_and_run(call: Arguments) -> Tensor:
    library: Any = LIBRARY.load()
    wrapper = library.Planned(causal=call.is_causal)
    query, key, value = (each.transpose(1, 2) for each in (call.query, call.key, call.value))
    return wrapper.run(query, key, value)[0].transpose(1, 2)


def at_once(call: Arguments) -> Tensor:
    output: Tensor = LIBRARY.load().attention(
        call.query, call.key, call.value, causal=call.is_causal, scale=1.0
    )
    return output


KERNELS: dict[str, Callable[[Arguments], Tensor]] = {
    "a function": on_bshd(at_once)[0],
    "an object with a method": plan_and_run,
}


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("kind", KERNELS)
def test_a_library(kind: str, tmp_path: Path) -> None:
    kernel = adapt("fast", LIBRARY, KERNELS[kind], (), "")
    plain = traced(kernel, CALL, tmp_path)
    assert plain.imports == ["import fast_attention"]
    assert plain.library == "fast-attention"
    assert not plain.impossible
    assert any("fast_attention." in line for line in plain.lines)
    assert not any("scaled_dot_product_attention" in line for line in plain.lines)
    assert torch.equal(answer(plain, CALL, tmp_path), kernel.attention(**CALL.arguments()))


@pytest.mark.parametrize("name", ["torch-math", "torch-flash", "torch-default", "eager"])
def test_kernels_of_pytorch(name: str, tmp_path: Path) -> None:
    call = random_call(attn_mask=normal(1, 1, 9, 13) > 0)
    kernel = find(name)
    plain = traced(kernel, call, tmp_path)
    assert not plain.impossible
    assert torch.equal(answer(plain, call, tmp_path), kernel.attention(**call.arguments()))
    only = [line for line in plain.lines if "sdpa_kernel" in line]
    assert bool(only) == (name in ("torch-math", "torch-flash"))


@pytest.mark.usefixtures("library")
def test_lines_that_nobody_needs_are_left_out_and_changes_in_place_are_not(tmp_path: Path) -> None:
    def attend(call: Arguments) -> Tensor:
        call.key.mean()
        query = call.query.clone()
        query[:, :, ::2] = 0
        query.mul_(2)
        return at_once(call._replace(query=query.transpose(1, 2), key=call.key.mT.mT)).mT.mT

    kernel = adapt("fast", LIBRARY, lambda call: attend(call), (), "")
    call = random_call(q_heads=9, kv_heads=9, q_len=9, kv_len=9)
    plain = traced(kernel, call, tmp_path)
    assert not any("mean" in line for line in plain.lines)
    assert "t1[:, :, ::2] = 0" in plain.lines
    assert "t1.mul_(2)" in plain.lines


@pytest.mark.usefixtures("library")
def test_tensors_of_neither_the_call_nor_the_source_are_stored(tmp_path: Path) -> None:
    scale = normal(1, seed=3)

    def attend(call: Arguments) -> Tensor:
        return on_bshd(at_once)[0](call._replace(query=call.query * scale))

    kernel = adapt("fast", LIBRARY, attend, (), "")
    plain = traced(kernel, CALL, tmp_path)
    assert any('stored["s0"]' in line for line in plain.lines)
    assert torch.equal(answer(plain, CALL, tmp_path), kernel.attention(**CALL.arguments()))


@pytest.mark.usefixtures("library")
def test_what_no_source_can_say_is_said(tmp_path: Path) -> None:
    def of_numpy(call: Arguments) -> Tensor:
        return torch.from_numpy(call.query.numpy() * 1)

    assert "beside" in traced(adapt("fast", LIBRARY, of_numpy, (), ""), CALL, tmp_path).impossible

    def with_a_function(call: Arguments) -> Tensor:
        output: Tensor = LIBRARY.load().attention(call.query, score_mod=lambda score: score)
        return output

    kernel = adapt("fast", LIBRARY, with_a_function, (), "")
    assert traced(kernel, CALL, tmp_path).impossible == "an argument of type function"


@pytest.mark.usefixtures("library")
def test_the_last_line_is_the_one_that_raises(tmp_path: Path) -> None:
    def attend(call: Arguments) -> Tensor:
        query = call.query.transpose(1, 2)
        output: Tensor = LIBRARY.load().attention(query, causal=True)
        return output

    plain = traced(adapt("fast", LIBRARY, attend, (), ""), CALL, tmp_path)
    assert plain.raised.startswith("TypeError")
    assert plain.lines[-1] == "fast_attention.attention(t0, causal=True)"


def test_a_triton_kernel_of_ours_is_a_library(tmp_path: Path) -> None:
    def attend(call: Arguments) -> Tensor:
        from attention_kernels.decode.paging import page

        return page(call.key, call.value, 4)[0]

    kernel = adapt("fast", LIBRARY, attend, (), "")
    plain = traced(kernel, CALL, tmp_path)
    assert plain.imports == ["import attention_kernels.decode.paging"]
    assert plain.lines == ["t0 = attention_kernels.decode.paging.page(key, value, 4)"]
    assert plain.result == "t0[0]"
