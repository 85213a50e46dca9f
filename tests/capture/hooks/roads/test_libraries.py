"""Functions of libraries, called directly: each argument is translated, or refused by its name."""

from __future__ import annotations

import importlib.machinery
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from capture import AttentionCall, load, record
from replay.accuracy.reference import attention
from tests.factories import normal


def attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, causal: bool, window: Any, softcap: float
) -> Tensor:
    """flash-attn's definition on one sequence, (S, H, D): bottom right, windows inclusive."""
    q, k, v = (each.transpose(0, 1) for each in (q, k, v))
    k, v = (each.repeat_interleave(q.shape[0] // k.shape[0], 0) for each in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    q_len, kv_len = scores.shape[-2:]
    offset = torch.arange(kv_len) - torch.arange(q_len)[:, None] - (kv_len - q_len)
    seen = torch.ones_like(offset, dtype=torch.bool)
    if causal:
        seen &= offset <= 0
    if window[0] >= 0:
        seen &= offset >= -window[0]
    if window[1] >= 0:
        seen &= offset <= window[1]
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num(0.0)
    return (weights @ v).transpose(0, 1)


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor:
    options = (softmax_scale, causal, window_size, softcap)
    return torch.stack([attend(*each, *options) for each in zip(q, k, v, strict=True)])


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    block_table: Tensor | None = None,
) -> Tensor:
    options = (softmax_scale, causal, window_size, softcap)
    pairs = [
        attend(q[a:b], k[c:d], v[c:d], *options)
        for a, b, c, d in zip(
            cu_seqlens_q[:-1], cu_seqlens_q[1:], cu_seqlens_k[:-1], cu_seqlens_k[1:], strict=True
        )
    ]
    return torch.cat(pairs)


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    block_table: Tensor | None = None,
    causal: bool = False,
) -> Tensor:
    """It writes the new keys and values into the cache."""
    length = int(torch.as_tensor(k_cache.shape[1] if cache_seqlens is None else cache_seqlens))
    if k is not None and v is not None:
        k_cache[:, length : length + k.shape[1]] += k
        v_cache[:, length : length + k.shape[1]] += v
        length += k.shape[1]
    parts = zip(q, k_cache[:, :length], v_cache[:, :length], strict=True)
    return torch.stack([attend(*each, None, causal, (-1, -1), 0.0) for each in parts])


@pytest.fixture
def flash_attn(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A package of that name whose functions compute what its own do."""
    package, interface = (
        types.ModuleType(name) for name in ("flash_attn", "flash_attn.flash_attn_interface")
    )
    for module in (package, interface):
        module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None)
        for function in (flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache):
            setattr(module, function.__name__, function)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return package


class Layer(nn.Module):
    """It holds the function where no module's attribute is looked up."""

    def __init__(self, function: Any, **options: Any) -> None:
        super().__init__()
        self.held = {"attend": function}
        self.options = options

    def forward(self, *tensors: Tensor) -> Tensor:
        output: Tensor = self.held["attend"](*tensors, **self.options)
        return output


def recorded(layer: Layer, out: Path, *tensors: Tensor) -> AttentionCall:
    expected = layer(*tensors)
    with record(layer, out) as recording:
        assert torch.equal(layer(*tensors), expected)
    assert torch.equal(layer(*tensors), expected)
    assert recording.problems == []
    (call,) = load(out)
    return call


@pytest.mark.usefixtures("flash_attn")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"window_size": (2, 1), "softmax_scale": 0.3},
        {"causal": True, "window_size": (3, -1), "softcap": 2.0, "deterministic": True},
    ],
    ids=str,
)
def test_a_function_held_in_a_dictionary_is_recorded(
    options: dict[str, Any], tmp_path: Path
) -> None:
    layer = Layer(flash_attn_func, **options)
    tensors = normal(2, 5, 4, 8), normal(2, 9, 2, 8, seed=1), normal(2, 9, 2, 8, seed=2)
    call = recorded(layer, tmp_path / "calls", *tensors)
    assert call.shape == (2, 4, 2, 5, 9, 8, 8)
    assert call.query.stride() == tensors[0].transpose(1, 2).stride()
    assert (call.origin.road, call.origin.backend) == ("flash_attn.flash_attn_func", "fa2")
    assert call.output is not None
    assert torch.allclose(attention(call), call.output.double(), atol=1e-5)


@pytest.mark.usefixtures("flash_attn")
def test_packed_sequences_are_recorded(tmp_path: Path) -> None:
    q_starts, k_starts = torch.tensor([0, 2, 5]).int(), torch.tensor([0, 4, 9]).int()
    layer = Layer(flash_attn_varlen_func, causal=True)
    tensors = normal(5, 4, 8), normal(9, 2, 8, seed=1), normal(9, 2, 8, seed=2)
    call = recorded(layer, tmp_path / "calls", *tensors, q_starts, k_starts, 3, 5)  # type: ignore[arg-type]
    assert call.shape == (1, 4, 2, 5, 9, 8, 8)
    assert (call.variant.max_seqlen_q, call.variant.max_seqlen_k) == (3, 5)
    assert call.output is not None
    assert torch.allclose(attention(call), call.output.double(), atol=1e-5)


@pytest.mark.usefixtures("flash_attn")
@pytest.mark.parametrize(
    ("function", "argument"),
    [(flash_attn_func, "alibi_slopes"), (flash_attn_varlen_func, "block_table")],
)
def test_what_cannot_be_said_is_refused_by_its_name(
    function: Any, argument: str, tmp_path: Path
) -> None:
    layer = Layer(function, **{argument: torch.ones(1)})
    starts = torch.tensor([0, 3]).int()
    packed = function is flash_attn_varlen_func
    tensor = normal(3, 2, 8) if packed else normal(1, 3, 2, 8)
    more: tuple[Any, ...] = (starts, starts, 3, 3) if packed else ()
    with record(layer, tmp_path / "calls") as recording:
        layer(tensor, tensor, tensor, *more)
    (signature,) = recording.census.to_json()["signatures"]
    assert signature["refusal"] == f"takes {argument}"
    assert (recording.seen, recording.kept) == (1, 0)


def test_functions_are_themselves_again(flash_attn: types.ModuleType, tmp_path: Path) -> None:
    code, defaults = flash_attn_func.__code__, flash_attn_func.__defaults__
    with record(Layer(flash_attn_func), tmp_path / "calls"):
        assert flash_attn_func.__code__ is not code
    assert flash_attn.flash_attn_func is flash_attn_func
    assert (flash_attn_func.__code__, flash_attn_func.__defaults__) == (code, defaults)
    assert not [name for name in globals() if "attention_replay" in name]


def test_a_function_that_two_modules_hold_is_counted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sageattn(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        return v

    code = sageattn.__code__
    for name in ("sageattention", "sageattention.core"):
        package = types.ModuleType(name)
        vars(package)["sageattn"] = sageattn
        monkeypatch.setitem(sys.modules, name, package)
    layer, tensor = Layer(sageattn), normal(1, 2, 5, 8)
    with record(layer, tmp_path / "calls") as recording:
        layer(tensor, tensor, tensor)
    (signature,) = recording.census.to_json()["signatures"]
    assert signature["refusal"] == "sageattention.sageattn is counted, not recorded"
    assert recording.seen == 1
    assert sageattn.__code__ is code


@pytest.mark.usefixtures("flash_attn")
@pytest.mark.parametrize(
    ("options", "left"),
    [({"causal": True}, None), ({"causal": True, "window_size": (2, 0)}, 2)],
)
def test_one_query_needs_no_causal_mask(
    options: dict[str, Any], left: int | None, tmp_path: Path
) -> None:
    """Plain SDPA answers it, unless it has a window too."""
    tensors = normal(2, 1, 4, 8), normal(2, 9, 2, 8, seed=1), normal(2, 9, 2, 8, seed=2)
    call = recorded(Layer(flash_attn_func, **options), tmp_path / "calls", *tensors)
    assert not call.is_causal
    assert call.variant.window == (left, None)
    assert call.features == (() if left is None else ("bottom-right", "window"))
    assert call.output is not None
    assert torch.allclose(attention(call), call.output.double(), atol=1e-5)


@pytest.mark.usefixtures("flash_attn")
@pytest.mark.parametrize("new", [False, True])
def test_a_cache_is_written_once(new: bool, tmp_path: Path) -> None:
    cache, keys = normal(1, 8, 2, 8), normal(1, 1, 2, 8, seed=1)
    layer = Layer(flash_attn_with_kvcache, cache_seqlens=5, causal=True)
    given = (keys, keys) if new else ()
    before = cache.clone()
    with record(layer, tmp_path / "calls") as recording:
        output = layer(normal(1, 1, 4, 8, seed=2), cache, cache.clone(), *given)
    assert (recording.seen, recording.kept) == (1, 0 if new else 1)
    before[:, 5:6] += keys if new else 0
    assert torch.equal(cache, before)
    if new:
        (signature,) = recording.census.to_json()["signatures"]
        assert signature["refusal"] == "takes new keys"
    else:
        (call,) = load(tmp_path / "calls")
        assert call.seqused_k is not None
        assert call.seqused_k.tolist() == [5]
        assert torch.allclose(attention(call), output.transpose(1, 2).double(), atol=1e-5)
