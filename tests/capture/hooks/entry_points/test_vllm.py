"""vLLM's backends, with a stand-in: layouts of caches, phases, options, and what is refused."""

import itertools
import sys
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from capture import load, record
from capture.call.batch import Batch
from capture.hooks.batch_counts import BatchCounts
from capture.storage.dataset import Dataset
from replay import use_kernel
from replay.accuracy.reference import attention
from replay.api.replay_calls import replay
from replay.end_to_end.model_check import own_kernel_of
from replay.end_to_end.model_clock import Clock
from replay.end_to_end.model_process import OWN
from replay.end_to_end.predicted_times import Calls, Clocked
from replay.end_to_end.prediction import everywhere, predict
from replay.rows.row import KernelId
from tests.capture.hooks.entry_points import vllm_stand_in
from tests.capture.hooks.entry_points.vllm_stand_in import (
    SLOTS,
    CommonAttentionMetadata,
    FirstBackend,
    Impl,
    LatentImpl,
    Layer,
    MLAAttention,
    SecondBackend,
    batch_of,
)
from tests.factories import normal

HEADS, KV_HEADS, WIDTH, BLOCKS = 4, 2, 32, 24
LENGTHS = (40, 7, 61)
PADDING = 3
"""Rows after the batch's tokens, as vLLM pads for CUDA graphs. It counts some of them as tokens."""


@pytest.fixture(autouse=True)
def _vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    latent = "vllm.model_executor.layers.attention.mla_attention"
    for name in ("vllm.v1.attention.backend", latent):
        monkeypatch.setitem(sys.modules, name, vllm_stand_in)


def batch(queries: tuple[int, ...], prefilling: tuple[bool, ...] | None) -> CommonAttentionMetadata:
    """Return a batch of three requests whose blocks lie anywhere in the cache."""
    table = torch.randperm(BLOCKS, generator=torch.Generator().manual_seed(0))[:12]
    found = batch_of(queries, LENGTHS, table.view(3, 4), prefilling)
    return replace(found, num_actual_tokens=sum(queries) + PADDING - 1)


class Model(nn.Module):
    """Model of one layer, which runs a batch."""

    def __init__(self, backend: type = FirstBackend, **options: Any) -> None:
        super().__init__()
        shape = backend.get_kv_cache_shape(BLOCKS, SLOTS, KV_HEADS, WIDTH)
        cache = normal(*shape, seed=3)
        self.attn = Layer("model.layers.0.attn", backend, Impl(WIDTH**-0.5, **options), cache)
        self.builder = vllm_stand_in.Builder()

    def run(self, common: CommonAttentionMetadata) -> torch.Tensor:
        """Run a batch as the engine does, which prepares it before the model's forward."""
        metadata = self.builder.build(common_prefix_len=0, common_attn_metadata=common)
        output: torch.Tensor = self(common, metadata)
        return output

    def forward(self, common: CommonAttentionMetadata, metadata: Any) -> torch.Tensor:
        tokens = int(common.query_start_loc[-1])
        if isinstance(self.attn.impl, LatentImpl):
            query = normal(common.num_actual_tokens, HEADS, WIDTH, seed=0)
            return self.attn(query, query, query, metadata)[:tokens]
        query = normal(tokens + PADDING, HEADS, WIDTH, seed=0).to(self.attn.query_dtype)
        new = normal(tokens + PADDING, KV_HEADS, WIDTH, seed=1)
        return self.attn(query, new, new, metadata)[:tokens]


def recorded(model: Model, common: CommonAttentionMetadata, out: Path) -> Any:
    """Return the call and the output of a batch; check that the recording has this output."""
    with record(model, out) as recording:
        output = model.run(common)
    assert (recording.problems, recording.capture.first_nonfinite) == ([], None)
    (call,) = load(out)
    assert call.origin.module == "model.layers.0.attn"
    assert torch.equal(call.output[0].transpose(0, 1).flatten(1), output)
    rtol = 1e-5 if call.query_scale is None else 8e-3
    assert torch.allclose(attention(call), call.output.double(), rtol=rtol, atol=1e-5)
    return call, output


CHUNK = (9, 7, 1)
OPTIONS = [{}, {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])}, {"soft_cap": 5.0}]


@pytest.mark.parametrize("backend", [FirstBackend, SecondBackend])
@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "sinks", "soft-cap"])
@pytest.mark.parametrize("window", [None, 20])
def test_a_batch_is_recorded_from_its_pages(
    backend: type, options: dict[str, Any], window: int | None, tmp_path: Path
) -> None:
    model = Model(backend, **options)
    model.attn.sliding_window = window
    call, _ = recorded(model, batch(CHUNK, (True, False, False)), tmp_path / "calls")
    assert call.origin.entry_point == "vllm"
    assert call.origin.backend == f"vllm-{backend.get_name().lower()}"
    assert call.key.shape[1:] == (KV_HEADS, SLOTS, WIDTH)


@pytest.mark.parametrize(
    ("kind", "query_scale", "key_scale"),
    [
        ("fp8", None, torch.tensor(0.02)),
        ("fp8_e5m2", None, torch.tensor([0.02, 0.5])),
        ("fp8", torch.tensor(0.01), torch.tensor([0.02, 0.5])),
    ],
    ids=["tensor", "head", "query"],
)
def test_an_fp8_cache_is_recorded_with_its_scales(
    kind: str, query_scale: torch.Tensor | None, key_scale: torch.Tensor, tmp_path: Path
) -> None:
    model = Model()
    layer, stored = model.attn, vllm_stand_in.FP8[kind]
    layer.kv_cache_dtype, layer._k_scale, layer._v_scale = kind, key_scale, torch.tensor(0.03)
    layer.kv_cache = (layer.kv_cache / 0.05).to(stored).view(torch.uint8)
    if query_scale is not None:
        layer._q_scale, layer.query_dtype = query_scale, stored
    call, output = recorded(model, batch(CHUNK, (True, False, False)), tmp_path / "calls")
    assert call.key.dtype == call.value.dtype == stored
    assert call.query.dtype == (torch.float32 if query_scale is None else stored)
    assert call.key_scale.tolist() == key_scale.expand(KV_HEADS).tolist()
    with use_kernel("eager", model) as swap:
        assert torch.allclose(model.run(batch(CHUNK, (True, False, False))), output, 2e-2, 2e-3)
    assert swap.hits == 1


@pytest.mark.parametrize("is_fp8", [False, True])
def test_latent_attention_is_recorded_from_its_pages(
    is_fp8: bool, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    model, cache = Model(), normal(BLOCKS, SLOTS, WIDTH, seed=3)
    impl = LatentImpl(0.1, kv_lora_rank=24)
    layer = model.attn = MLAAttention("model.layers.0.attn", FirstBackend, impl, cache)
    if is_fp8:
        layer.kv_cache_dtype, layer._k_scale = "fp8", torch.tensor(0.02)
        layer.kv_cache = (cache / 0.02).to(torch.float8_e4m3fn).view(torch.uint8)
    decode = batch((1, 1, 1), (False, False, False))
    call, output = recorded(model, decode, tmp_path / "calls")
    with use_kernel("eager", model) as swap:
        assert torch.allclose(model.run(decode), output, 2e-2, 2e-3)
    assert swap.hits == 1
    assert call.origin.phase == "decode"
    assert call.value_is_in_key
    assert ("scaled" in call.features) == is_fp8
    with record(model, tmp_path / "prompts first"):
        for layer.has_prompts_only in (True, False):
            model.run(decode)
    assert [str(each.message) for each in recwarn] == []  # no whole graph was counted


@pytest.mark.parametrize(("window", "visible"), [(None, LENGTHS), (20, (28, 7, 20))])
def test_the_census_has_the_phase_and_the_lengths_of_every_batch(
    window: int | None, visible: tuple[int, ...], tmp_path: Path
) -> None:
    model = Model()
    model.attn.sliding_window = window
    batches: list[tuple[str, tuple[int, ...], tuple[bool, ...] | None]] = [
        ("mixed", CHUNK, None),
        ("decode", (1, 1, 1), None),
        ("decode", (1, 1, 1), (False, False, False)),
        ("extend", (9, 3, 1), (True, True, True)),
        ("prefill", LENGTHS, (True, True, True)),
        ("mixed", (9, 1, 1), (True, False, False)),
        ("mixed", (40, 3, 61), (True, True, True)),
    ]
    with record(model, tmp_path / "calls", max=1) as recording:
        for _, queries, prefilling in batches:
            model.run(batch(queries, prefilling))
    assert recording.problems == []
    (capture,) = Dataset.open(tmp_path / "calls").captures
    (signature,) = capture.census["signatures"]
    assert signature["query"] == [1, HEADS, -1, WIDTH]
    calls = {row["phase"]: row["calls"] for row in capture.census["rows"]}
    assert calls == Counter(phase for phase, *_ in batches)
    found = {(each["phase"], *each["queries"]): each for each in capture.census["batches"]}
    assert found[("mixed", *CHUNK)]["keys"] == [*visible]
    counts = Counter((phase, *queries) for phase, queries, _ in batches)
    assert {key: each["calls"] for key, each in found.items()} == counts


def test_lengths_are_bounded_and_their_batches_an_even_sample() -> None:
    counts: BatchCounts[str] = BatchCounts(most=100)
    for keys in range(1000):
        for _ in range(2):  # layers
            counts.add("decode", "any", Batch((1,), (keys,)))
    kept = counts.to_json({"any": 0})
    steps = {late["keys"][0] - early["keys"][0] for early, late in itertools.pairwise(kept)}
    assert 25 <= len(kept) <= 50
    assert steps == {32}
    assert all(each["calls"] == 2 for each in kept)


@pytest.mark.parametrize("is_capturing", [False, True])
def test_profiling_and_making_a_graph_are_not_calls(
    is_capturing: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("capture.hooks.entry_points.vllm.is_capturing", lambda _: is_capturing)
    model = Model()
    tokens = normal(5, HEADS, WIDTH, seed=0)
    with record(model, tmp_path / "calls") as recording:
        model.run(batch(CHUNK, None)) if is_capturing else model.attn(tokens, tokens, tokens, None)
    assert recording.seen == 0


def test_a_kernel_answers_in_the_engine_and_is_predicted(tmp_path: Path) -> None:
    model, prefilling = Model(), (True, True, True)
    model.attn.sliding_window = 20
    batches = [
        batch(LENGTHS, prefilling),
        batch((9, 3, 1), prefilling),
        batch(CHUNK, (True, False, False)),
        *[batch((1, 1, 1), (False, False, False))] * 2,
    ]
    with record(model, tmp_path / "calls"):
        expected = [model.run(common) for common in batches]
    with use_kernel("eager", model) as swap:
        outputs = [model.run(common) for common in batches]
    assert (swap.hits, swap.fallbacks) == (5, {})
    for output, own in zip(outputs, expected, strict=True):
        assert torch.allclose(output, own, atol=1e-5)
        assert not torch.equal(output, own)
    (recorded,) = Dataset.open(tmp_path / "calls").captures
    kernels = ["torch-masked", "eager"]
    rows = replay(str(tmp_path / "calls"), kernels=kernels, rounds=3, workers=False, progress=False)
    assert own_kernel_of(rows) == "torch-masked"  # in place of vLLM's function
    assert all(row.call.has_window for row in rows)
    times = Clocked((9.0,)), {"mixed": Clocked((9.0,)), "decode": Clocked((9.0,), 2)}
    prediction = partial(predict, recorded.census, rows, everywhere(KernelId("eager")), OWN, *times)
    with pytest.raises(ValueError, match="was not timed here: vllm-flash_attn"):
        prediction()
    found = prediction(stand_ins=True)
    assert (found.run.calls, found.run.reason) == (Calls(swapped=5), "")
    assert {phase: each.calls.swapped for phase, each in found.phases.items()} == {
        "mixed": 1,
        "decode": 2,
    }


def test_forwards_are_timed_by_the_phase_of_their_batch() -> None:
    model = Model()
    clock = Clock({"": model}, torch.device("cpu"))
    with use_kernel("eager", model), clock.running() as times:
        for queries in (CHUNK, (1, 1, 1), (1, 1, 1)):
            model.run(batch(queries, None))
    assert {phase: len(seconds) for phase, seconds in times.forwards.items()} == {
        "mixed": 1,
        "decode": 2,
    }
    with clock.running() as times:
        model(batch(CHUNK, None), None)
    assert [*times.forwards] == ["encode"]  # no engine runs any more
