"""Library functions that models call directly: each argument is translated or refused by name."""

import importlib.machinery
import inspect
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from capture import load, record
from capture.hooks.entry_points import libraries
from replay import use_kernel
from replay.accuracy.reference import attention
from tests import flash_attn_stand_in
from tests.capture.hooks.entry_points.layers import Layer, recorded, refusal
from tests.factories import normal
from tests.flash_attn_stand_in import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
    flash_mla_with_kvcache,
)
from tests.replay.kernels.stand_ins import parameters


@pytest.fixture(autouse=True)
def flash_attn(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """Stand-in package whose functions compute what flash-attn's compute."""
    package, interface = (
        types.ModuleType(name) for name in ("flash_attn", "flash_attn.flash_attn_interface")
    )
    for module in (package, interface):
        module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None)
        for name, function in vars(flash_attn_stand_in).items():
            if name.startswith("flash_attn"):
                setattr(module, name, function)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return package


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"window_size": (2, 1), "softmax_scale": 0.3},
        {"causal": True, "window_size": (3, -1), "softcap": 2.0, "deterministic": True},
        {"softcap": 0.0},
        {"softcap": -1.0},
    ],
    ids=str,
)
def test_function_held_in_a_dictionary_is_recorded(options: dict[str, Any], tmp_path: Path) -> None:
    layer = Layer(flash_attn_func, **options)
    tensors = normal(2, 5, 4, 8), normal(2, 9, 2, 8, seed=1), normal(2, 9, 2, 8, seed=2)
    call = recorded(layer, tmp_path / "calls", *tensors)
    assert call.shape == (2, 4, 2, 5, 9, 8, 8)
    assert call.query.stride() == tensors[0].transpose(1, 2).stride()
    assert (call.origin.entry_point, call.origin.backend) == ("flash_attn.flash_attn_func", "fa2")
    assert ("softcap" in call.features) == (options.get("softcap", 0) > 0)


def test_packed_sequences_are_recorded(tmp_path: Path) -> None:
    q_starts, k_starts = torch.tensor([0, 2, 5]).int(), torch.tensor([0, 4, 9]).int()
    layer = Layer(flash_attn_varlen_func, causal=True)
    tensors = normal(5, 4, 8), normal(9, 2, 8, seed=1), normal(9, 2, 8, seed=2)
    call = recorded(layer, tmp_path / "calls", *tensors, q_starts, k_starts, 3, 5)  # type: ignore[arg-type]
    assert call.shape == (1, 4, 2, 5, 9, 8, 8)
    assert (call.variant.max_seqlen_q, call.variant.max_seqlen_k) == (3, 5)


STARTS = torch.tensor([0, 4, 9]).int()
QUERY, QKV, KV = normal(9, 4, 8), normal(9, 3, 4, 8), normal(9, 2, 2, 8, seed=1)


@pytest.mark.parametrize(
    ("function", "tensors", "options", "kv_heads"),
    [
        (flash_attn_qkvpacked_func, (QKV[None],), {}, 4),
        (flash_attn_qkvpacked_func, (normal(1, 9, 8, 8),), {"num_heads_q": 4}, 2),
        (flash_attn_kvpacked_func, (QUERY[None], KV[None]), {}, 2),
        (flash_attn_varlen_qkvpacked_func, (QKV, STARTS, 5), {}, 4),
        (flash_attn_varlen_kvpacked_func, (QUERY, KV, STARTS, STARTS, 5, 5), {}, 2),
    ],
)
def test_packed_tensors_are_recorded_apart(
    function: Any, tensors: Any, options: dict[str, Any], kv_heads: int, tmp_path: Path
) -> None:
    call = recorded(Layer(function, causal=True, **options), tmp_path / "calls", *tensors)
    assert call.shape == (1, 4, kv_heads, 9, 9, 8, 8)
    assert call.origin.entry_point == f"flash_attn.{function.__name__}"
    if "varlen" in function.__name__:
        assert call.cu_seqlens_q is not None
        assert call.cu_seqlens_k is not None
        assert call.cu_seqlens_q.tolist() == call.cu_seqlens_k.tolist() == [0, 4, 9]
        assert (call.variant.max_seqlen_q, call.variant.max_seqlen_k) == (5, 5)


def test_arguments_of_torchs_varlen_attn_are_known() -> None:
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    names = set(inspect.signature(varlen.varlen_attn).parameters)
    assert names <= {*libraries.NAMES, "return_aux", "enable_gqa", "num_splits"}


@pytest.mark.parametrize("function", [flash_attn_func, flash_attn_varlen_func])
def test_unsupported_argument_is_refused_by_its_name(function: Any, tmp_path: Path) -> None:
    layer = Layer(function, alibi_slopes=torch.ones(1))
    starts = torch.tensor([0, 3]).int()
    packed = function is flash_attn_varlen_func
    tensor = normal(3, 2, 8) if packed else normal(1, 3, 2, 8)
    more: tuple[Any, ...] = (starts, starts, 3, 3) if packed else ()
    reason = refusal(layer, tmp_path / "calls", tensor, tensor, tensor, *more)
    assert reason == "takes alibi_slopes"


def test_functions_are_restored(flash_attn: types.ModuleType, tmp_path: Path) -> None:
    code, defaults = flash_attn_func.__code__, flash_attn_func.__defaults__
    with record(Layer(flash_attn_func), tmp_path / "calls"):
        assert flash_attn_func.__code__ is not code
    assert flash_attn.flash_attn_func is flash_attn_func
    assert (flash_attn_func.__code__, flash_attn_func.__defaults__) == (code, defaults)
    assert not [name for name in globals() if "attention_replay" in name]


def test_function_that_two_modules_hold_is_counted_once(
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
    reason = refusal(layer, tmp_path / "calls", tensor, tensor, tensor)
    assert reason == "sageattention.sageattn is counted, not recorded"
    assert sageattn.__code__ is code


@pytest.mark.parametrize(
    ("options", "left"), [({"causal": True}, None), ({"causal": True, "window_size": (2, 0)}, 2)]
)
def test_one_query_needs_no_causal_mask(
    options: dict[str, Any], left: int | None, tmp_path: Path
) -> None:
    """Plain SDPA can run a call with one query, unless the call also has a window."""
    tensors = normal(2, 1, 4, 8), normal(2, 9, 2, 8, seed=1), normal(2, 9, 2, 8, seed=2)
    call = recorded(Layer(flash_attn_func, **options), tmp_path / "calls", *tensors)
    assert not call.is_causal
    assert call.variant.window == (left, None)
    assert call.features == (() if left is None else ("bottom-right", "window"))


def test_cache_is_recorded(tmp_path: Path) -> None:
    cache = normal(1, 8, 2, 8)
    layer = Layer(flash_attn_with_kvcache, cache_seqlens=5, causal=True)
    call = recorded(layer, tmp_path / "calls", normal(1, 1, 4, 8, seed=2), cache, cache.clone())
    assert call.seqused_k is not None
    assert call.seqused_k.tolist() == [5]


def test_new_keys_are_written_to_the_cache_once(tmp_path: Path) -> None:
    cache, keys = normal(1, 8, 2, 8), normal(1, 1, 2, 8, seed=1)
    expected = cache.clone()
    expected[:, 5:6] += keys
    layer = Layer(flash_attn_with_kvcache, cache_seqlens=5, causal=True)
    tensors = (normal(1, 1, 4, 8, seed=2), cache, cache.clone(), keys, keys)
    assert refusal(layer, tmp_path / "calls", *tensors) == "takes new keys"
    assert torch.equal(cache, expected)


POOL = 40
TABLE = torch.tensor([[31, 7, 38, -1, 99], [2, 7, 99, -1, -1]]).int()
"""Page table in which two sequences share page 7; entries after a sequence's pages are invalid."""


def pools(page_size: int = 4) -> tuple[Tensor, Tensor]:
    """Return pools of key pages and value pages that alternate in memory, as in a cache."""
    both = normal(POOL, 2, page_size, 2, 8)
    return both[:, 0], both[:, 1]


def test_pages_that_a_call_reads_are_recorded(tmp_path: Path) -> None:
    key, value = pools()
    lengths = torch.tensor([10, 7]).int()
    layer = Layer(flash_attn_with_kvcache, cache_seqlens=lengths, block_table=TABLE, causal=True)
    call = recorded(layer, tmp_path / "calls", normal(2, 3, 4, 8, seed=1), key, value)
    assert call.shape == (2, 4, 2, 3, 20, 8, 8)
    assert call.features == ("bottom-right", "paged")
    assert call.page_table is not None
    assert call.page_table.tolist() == [[2, 1, 3, 0, 0], [0, 1, 0, 0, 0]]
    assert call.seqused_k is not None
    assert call.seqused_k.tolist() == [10, 7]
    for stored, pool in ((call.key, key), (call.value, value)):
        assert torch.equal(stored, pool[[2, 7, 31, 38]].transpose(1, 2))
        assert stored.transpose(1, 2).is_contiguous()


def test_packed_queries_over_pages(tmp_path: Path) -> None:
    """flash-attn 2 specifies sequence lengths by offsets."""
    starts_q, starts_k = torch.tensor([0, 2, 5]).int(), torch.tensor([0, 10, 17]).int()
    layer = Layer(flash_attn_varlen_func, causal=True, window_size=(3, 0), block_table=TABLE)
    tensors = (normal(5, 4, 8, seed=1), *pools(), starts_q, starts_k, 3, 10)
    call = recorded(layer, tmp_path / "calls", *tensors)  # type: ignore[arg-type]
    assert call.features == ("bottom-right", "window", "packed", "paged")
    assert call.cu_seqlens_k is None
    assert call.seqused_k is not None
    assert call.seqused_k.tolist() == [10, 7]
    assert call.variant.max_seqlen_k == 10


def test_missing_page_does_not_reach_the_model(tmp_path: Path) -> None:
    """On a GPU, looking up the missing page would crash the model's run."""
    layer = Layer(flash_attn_with_kvcache, cache_seqlens=torch.tensor([10, 7]), block_table=TABLE)
    query, (key, value) = normal(2, 3, 4, 8, seed=1), pools()
    expected = layer(query, key, value)
    layer.options["block_table"] = torch.where(TABLE == 31, 31 - POOL, TABLE)
    with record(layer, tmp_path / "calls") as recording:
        assert torch.equal(layer(query, key, value), expected)
    assert recording.problems[0] == (
        "Layer, step 0: the model calls attention with invalid arguments: page_table names pages "
        "-9 to 38 of 40"
    )
    assert (recording.seen, recording.kept) == (1, 0)


def test_calls_of_a_growing_cache_have_one_signature(tmp_path: Path) -> None:
    key, value = pools()
    layer = Layer(flash_attn_with_kvcache, block_table=TABLE)
    with record(layer, tmp_path / "calls") as recording:
        for lengths in ([10, 7], [11, 8]):
            layer.options["cache_seqlens"] = torch.tensor(lengths).int()
            layer(normal(2, 1, 4, 8, seed=1), key, value)
    census = recording.census.to_json()
    (signature,), (row,) = census["signatures"], census["rows"]
    assert signature["key"] == (2, 2, 20, 8)
    assert signature["beyond"] == "pages of 4"
    assert row["calls"] == 2


def test_one_module_s_calls_with_other_options_are_counted_apart(tmp_path: Path) -> None:
    tensor = normal(1, 6, 2, 8)
    layer = Layer(flash_attn_func, causal=True)
    with record(layer, tmp_path / "calls") as recording:
        for window in ((1, 0), (2, 0)):
            layer.options["window_size"] = window
            layer(tensor, tensor, tensor)
    kinds = [each["beyond"] for each in recording.census.to_json()["signatures"]]
    assert kinds == ["window 1/∞", "window 2/∞"]


@pytest.fixture
def flash_mla(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("flash_mla.flash_mla_interface")
    vars(module)["flash_mla_with_kvcache"] = flash_mla_with_kvcache
    monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.mark.usefixtures("flash_mla")
def test_value_that_is_part_of_the_key_stays_part_of_it(tmp_path: Path) -> None:
    query, cache = normal(2, 1, 4, 24, seed=1), normal(POOL, 4, 1, 24)
    lengths = torch.tensor([10, 7]).int()
    layer = Layer(flash_mla_with_kvcache, softmax_scale=0.2, causal=True)
    expected, _ = layer(query, cache, TABLE, lengths, 16, None)
    with record(layer, tmp_path / "calls") as recording:
        output, _ = layer(query, cache, TABLE, lengths, 16, None)
    assert torch.equal(output, expected)
    assert recording.problems == []
    assert recording.counts.nbytes == 4 * (query.numel() + 4 * 4 * 24 + output.numel() + 10 + 2)
    (call,) = load(tmp_path / "calls")
    assert call.shape == (2, 4, 1, 1, 20, 24, 16)
    assert (call.origin.entry_point, call.origin.backend, call.scale) == (
        "flash_mla.flash_mla_with_kvcache",
        "flash-mla",
        0.2,
    )
    assert call.value_is_in_key
    assert torch.equal(call.value, call.key[..., :16])
    assert call.output is not None
    assert torch.allclose(attention(call), call.output.double(), atol=1e-5)


@pytest.mark.usefixtures("flash_mla")
@pytest.mark.parametrize("option", [{"is_fp8_kvcache": True}, {"indices": torch.zeros(2, 1, 3)}])
def test_flash_mla_with_other_cache_formats_is_refused(
    option: dict[str, Any], tmp_path: Path
) -> None:
    layer = Layer(flash_mla_with_kvcache, **option)
    lengths = torch.tensor([10, 7]).int()
    tensors: tuple[Any, ...] = (
        normal(2, 1, 4, 24),
        normal(POOL, 4, 1, 24),
        TABLE,
        lengths,
        16,
        None,
    )
    assert refusal(layer, tmp_path / "calls", *tensors) == f"takes {next(iter(option))}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_vllms_flash_attn_writes_to_the_given_memory(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's function has another argument order, `out`, and scales, even for 16-bit tensors."""
    is_scaled = dtype.itemsize == 1

    @parameters(
        "q, k, v, max_seqlen_q, cu_seqlens_q, max_seqlen_k, cu_seqlens_k=None, seqused_k=None, "
        "q_v=None, softmax_scale=None, causal=False, window_size=None, block_table=None, out=None, "
        "k_descale=None, fa_version=2"
    )
    def flash_attn_varlen_func(given: types.SimpleNamespace) -> Tensor:
        taken = ("q", "k", "v", "cu_seqlens_q", "max_seqlen_q", "max_seqlen_k", "softmax_scale")
        named = {name: getattr(given, name) for name in (*taken, "causal", "block_table")}
        factors = given.k_descale[0, :, None] if is_scaled else 1.0
        named |= {"k": given.k.float() * factors, "v": given.v.float()}
        named["cu_seqlens_k"] = F.pad(given.seqused_k.cumsum(0), (1, 0))
        window = given.window_size or (-1, -1)
        output = flash_attn_stand_in.flash_attn_varlen_func(**named, window_size=window)
        return given.out.copy_(output)

    name = "vllm.vllm_flash_attn.flash_attn_interface"
    module = types.ModuleType(name)
    vars(module)["flash_attn_varlen_func"] = flash_attn_varlen_func
    monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "flash_attn.flash_attn_interface")  # which the stand-in calls
    starts, query = torch.tensor([0, 2, 5]).int(), normal(5, 4, 8, seed=1)
    key, value = (pool.to(dtype) for pool in pools())
    options: dict[str, Any] = {
        "max_seqlen_q": 3,
        "cu_seqlens_q": starts,
        "max_seqlen_k": 10,
        "seqused_k": torch.tensor([10, 7]).int(),
        "causal": True,
        "window_size": [-1, -1],
        "block_table": TABLE,
        "out": torch.empty(5, 4, 8),
        "k_descale": torch.tensor([0.5, 2.0]).expand(2, 2),
        "fa_version": 3,
    }
    call = recorded(Layer(flash_attn_varlen_func, **options), tmp_path / "calls", query, key, value)
    assert call.features == ("bottom-right", "packed", "paged", "scaled")[: 3 + is_scaled]
    expected = options["out"].clone()
    options["out"].zero_()
    with use_kernel("eager") as swap:
        returned = flash_attn_varlen_func(query, key, value, **options)
    assert (swap.hits, swap.fallbacks) == (1, {})
    assert returned is options["out"]
    assert torch.allclose(returned, expected, atol=1e-5)
    if is_scaled:
        assert (call.key_scale.tolist(), call.value_scale.tolist()) == ([0.5, 2.0], [1.0, 1.0])
        other = Layer(flash_attn_varlen_func, **{**options, "k_descale": torch.ones(2, 2)})
        reason = refusal(other, tmp_path / "refused", query, key, value)
        assert reason == "takes a k_descale of its own for each sequence"
