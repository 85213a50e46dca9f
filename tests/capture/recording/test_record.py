"""`record` around models of every kind, as a library."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from capture import AttentionCall, load, record
from capture.cli.verify import verify
from capture.errors import CaptureError, RecordingWarning
from capture.hooks.interceptor import TORCH_SDPA
from capture.recording.recording import Recording
from capture.storage.call_file import PackedCall
from capture.storage.capture_record import CaptureRecord
from capture.storage.dataset import MANIFEST, Dataset
from capture.storage.target import Target
from tests.factories import tiny_llama

MakeLayers = Callable[..., Any]


class Caller(nn.Module):
    """Makes SDPA calls of one's own choice."""

    def forward(self, *calls: Callable[[], Tensor]) -> list[Tensor]:
        return [call() for call in calls]


def attend(*args: Any, **kwargs: Any) -> Callable[[], Tensor]:
    return lambda: F.scaled_dot_product_attention(*args, **kwargs)


def recorded(out: Path, *calls: Callable[[], Tensor], **options: Any) -> Dataset:
    model = Caller()
    with record(model, out, **options):
        model(*calls)
    return load(out)


def assert_good(data: Dataset) -> None:
    """Checksums hold, SDPA repeats every output, the census agrees with the files."""
    texts = {finding.text for finding in verify(data)}
    assert texts <= {"intact; output bit-identical", "intact; no output recorded"}
    for capture in data.captures:
        kept = [entry for entry in data.entries if entry.origin.model == capture.model]
        rows = capture.census["rows"]
        assert sum(row["kept"] for row in rows) == len(kept)
        assert sum(row["calls"] for row in rows) == capture.calls_seen
        for row in rows:
            signature = capture.census["signatures"][row["signature"]]
            here = [
                entry
                for entry in kept
                if (entry.origin.module, entry.origin.phase) == (row["module"], row["phase"])
                and signature["query"][-2:] == list(entry.header.layouts["query"].size[-2:])
                and signature["key"][-2:] == list(entry.header.layouts["key"].size[-2:])
            ]
            assert len(here) >= row["kept"]
            assert row["first_step"] <= row["last_step"]


def test_a_model_s_calls_come_back(layers: nn.Module, states: Tensor, tmp_path: Path) -> None:
    expected = layers(states)
    with record(layers, tmp_path, name="mine", weights="random", seed=3) as recording:
        output = layers(states)
        layers(states)
        assert recording.seen == recording.kept == 4
    assert torch.equal(output, expected)
    data = load(tmp_path)
    assert_good(data)
    assert [(call.origin.module, call.origin.step, call.origin.call_index) for call in data] == [
        ("layers.0", 0, 0),
        ("layers.1", 0, 1),
        ("layers.0", 1, 2),
        ("layers.1", 1, 3),
    ]
    first = data[0]
    # Views of one projection of 3 × 16: the strides tell it.
    assert first.query.stride() == first.key.stride() == (5 * 48, 8, 48, 1)
    assert (first.origin.model, first.origin.weights, first.origin.seed) == ("mine", "random", 3)
    assert first.origin.backend == "torch-flash"
    assert first.origin.disabled_backends == []
    assert first.origin.device == "cpu"
    assert first.origin.versions["torch"] == torch.__version__
    [capture] = data.captures
    assert capture.complete
    assert (capture.calls_seen, capture.sample, capture.modules) == (4, "spread", "*")


def test_three_dimensions_become_four(tmp_path: Path) -> None:
    query, key, value = torch.randn(3, 4, 5, 8)
    mask = torch.randn(4, 5, 5)
    data = recorded(
        tmp_path,
        attend(query, key, value),
        attend(query, key, value, attn_mask=mask),
        attend(query, key[:2], value[:2], enable_gqa=True),
    )
    assert_good(data)
    assert [call.query.shape for call in data] == [(1, 4, 5, 8)] * 3
    assert data[1].attn_mask is not None
    assert data[1].attn_mask.shape == (1, 4, 5, 5)


def test_two_dimensions_become_four(tmp_path: Path) -> None:
    flat = torch.randn(5, 8)
    data = recorded(tmp_path, attend(flat, flat, flat))
    assert data[0].query.shape == (1, 1, 5, 8)
    # Not bit for bit: PyTorch multiplies plain matrices otherwise than batches of one.
    assert [finding.good for finding in verify(data)] == [True]


@pytest.mark.parametrize(
    "mask", [None, (5, 5), (3, 1, 5, 5), (2, 1, 1, 5, 5), (2, 3, 4, 5, 5), (4, 1, 5)]
)
def test_five_dimensions_become_four(tmp_path: Path, mask: Sequence[int] | None) -> None:
    query, key, value = torch.randn(3, 2, 3, 4, 5, 8)
    attn_mask = None if mask is None else torch.randn(mask)
    data = recorded(tmp_path, attend(query, key, value, attn_mask))
    assert_good(data)
    assert data[0].shape == (6, 4, 4, 5, 5, 8, 8)
    expected = TORCH_SDPA(query, key, value, attn_mask).flatten(0, 1)
    torch.testing.assert_close(data[0].output, expected)


def test_a_batch_that_is_broadcast_is_recorded_whole(tmp_path: Path) -> None:
    query, shared = torch.randn(3, 2, 5, 8), torch.randn(1, 2, 5, 8)
    data = recorded(tmp_path, attend(query, shared, shared))
    assert_good(data)
    assert data[0].key.shape == (3, 2, 5, 8)
    assert data[0].key.stride(0) == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes(tmp_path: Path, dtype: torch.dtype) -> None:
    query, key, value = torch.randn(3, 1, 2, 5, 8, dtype=dtype)
    data = recorded(tmp_path, attend(query, key, value, is_causal=True))
    assert_good(data)
    assert data[0].dtype == dtype


def test_masks_of_every_kind(tmp_path: Path) -> None:
    query, key, value = torch.randn(3, 2, 4, 5, 8)
    masks = [
        torch.ones(5, 5, dtype=torch.bool).tril(),
        torch.zeros(1, 1, 5, 5, dtype=torch.bool),  # nothing to attend to
        torch.randn(2, 1, 1, 5),
        torch.randn(5, 5).masked_fill(torch.ones(5, 5).triu(1) > 0, -torch.inf),
        torch.randn(1, 1, 5, 5).expand(2, 4, 5, 5),
    ]
    data = recorded(tmp_path, *(attend(query, key, value, attn_mask=mask) for mask in masks))
    assert len(data) == len(masks)
    assert_good(data)


def test_autocast_records_what_reaches_the_kernel(tmp_path: Path) -> None:
    query, key = torch.randn(2, 1, 2, 5, 8)
    value = torch.randn(1, 5, 2, 8).transpose(1, 2).bfloat16()
    mask = torch.randn(5, 5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        data = recorded(tmp_path, attend(query, key, value, attn_mask=mask))
    assert_good(data)
    tensors = data[0].tensors()
    assert {name: tensor.dtype for name, tensor in tensors.items()} == dict.fromkeys(
        tensors, torch.bfloat16
    )
    assert torch.equal(data[0].query, query.bfloat16())
    assert data[0].value.stride() == value.stride()
    assert data.captures[0].census["signatures"][0]["dtype"] == "bfloat16"


def test_a_training_step_is_the_same_under_record(
    make_layers: MakeLayers, states: Tensor, tmp_path: Path
) -> None:
    plain, watched = make_layers().train(), make_layers().train()
    plain(states).square().sum().backward()
    with record(watched, tmp_path):
        watched(states).square().sum().backward()
    gradients = [parameter.grad for parameter in plain.parameters()]
    assert all(gradient is not None for gradient in gradients)
    for gradient, parameter in zip(gradients, watched.parameters(), strict=True):
        assert torch.equal(gradient, parameter.grad)
    assert_good(load(tmp_path))


def test_inference_mode(layers: nn.Module, states: Tensor, tmp_path: Path) -> None:
    with torch.inference_mode(), record(layers, tmp_path):
        layers(states)
    assert_good(load(tmp_path))


def test_a_buffer_updated_in_place_is_recorded_as_it_was(tmp_path: Path) -> None:
    """As in a StaticCache: the same memory at every step, with other values."""
    cache = torch.zeros(1, 2, 16, 8)
    queries = torch.randn(4, 1, 2, 1, 8)

    def step(index: int) -> Callable[[], Tensor]:
        def run() -> Tensor:
            cache[:, :, index] = index + 1.0
            keys = cache[:, :, : index + 1]
            return F.scaled_dot_product_attention(queries[index], keys, keys)

        return run

    data = recorded(tmp_path, *map(step, range(4)))
    cache.zero_()
    assert_good(data)
    for index, call in enumerate(data):
        assert call.key[0, 0, :, 0].tolist() == [float(n + 1) for n in range(index + 1)]
        assert call.key.stride() == (256, 128, 8, 1)


def test_an_output_changed_in_place_by_the_model_is_recorded_as_it_was(tmp_path: Path) -> None:
    query = torch.randn(1, 2, 5, 8)
    data = recorded(tmp_path, lambda: F.scaled_dot_product_attention(query, query, query).zero_())
    assert_good(data)


def test_outputs_can_be_left_out(layers: nn.Module, states: Tensor, tmp_path: Path) -> None:
    with record(layers, tmp_path, output=False):
        layers(states)
    data = load(tmp_path)
    assert_good(data)
    assert all(call.output is None for call in data)
    assert {finding.text for finding in verify(data)} == {"intact; no output recorded"}


@pytest.mark.parametrize("sample", ["spread", "first"])
def test_exactly_max_files_and_a_census_of_all(
    make_layers: MakeLayers, states: Tensor, tmp_path: Path, sample: str
) -> None:
    model = make_layers(3)
    with record(model, tmp_path, max=5, sample=sample) as recording:
        for _ in range(7):
            model(states)
    assert (recording.seen, recording.kept) == (21, 5)
    assert len(list(tmp_path.glob("*.safetensors"))) == 5
    data = load(tmp_path)
    assert_good(data)
    assert data.captures[0].calls_seen == 21
    rows = data.captures[0].census["rows"]
    assert [(row["module"], row["calls"], row["first_step"], row["last_step"]) for row in rows] == [
        (f"layers.{layer}", 7, 0, 6) for layer in range(3)
    ]
    if sample == "first":
        assert [call.origin.call_index for call in data] == list(range(5))
    else:
        assert Counter(call.origin.module for call in data).keys() == {
            "layers.0",
            "layers.1",
            "layers.2",
        }


def test_max_bytes_counts_what_is_stored(layers: nn.Module, states: Tensor, tmp_path: Path) -> None:
    with record(layers, tmp_path / "all", max=1) as recording:
        layers(states)
    one = recording.nbytes
    assert one == 4 * 5 * 16 * 4
    with record(layers, tmp_path / "some", max_bytes=3 * one + 1) as recording:
        for _ in range(5):
            layers(states)
    assert recording.kept == len(load(tmp_path / "some")) == 3
    assert recording.refused_for_bytes
    with (
        pytest.warns(RecordingWarning, match="no call fits in `max_bytes=`"),
        record(layers, tmp_path / "none", max_bytes=one - 1),
    ):
        layers(states)


@pytest.mark.parametrize("options", [{"max": 0}, {"sample": "random"}, {"max_bytes": 0}])
def test_wrong_limits_are_refused_before_anything_runs(
    layers: nn.Module, tmp_path: Path, options: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match="must be"), record(layers, tmp_path, **options):
        pytest.fail("ran")


def test_a_pipeline_keeps_its_transformer_s_calls_and_counts_the_others(
    make_layers: MakeLayers, states: Tensor, tmp_path: Path
) -> None:
    from diffusers import DDIMScheduler, DiffusionPipeline
    from diffusers.configuration_utils import ConfigMixin, register_to_config
    from diffusers.models.modeling_utils import ModelMixin

    class Part(ModelMixin, ConfigMixin):  # type: ignore[misc]
        @register_to_config
        def __init__(self) -> None:
            super().__init__()
            self.inner = make_layers()

        def forward(self, states: Tensor, timestep: Tensor | None = None) -> Tensor:
            return self.inner(states)

    class Pipeline(DiffusionPipeline):  # type: ignore[misc]
        def __init__(self, text_encoder: Any, transformer: Any, scheduler: Any) -> None:
            super().__init__()
            self.register_modules(
                text_encoder=text_encoder, transformer=transformer, scheduler=scheduler
            )

        @torch.no_grad()
        def __call__(self) -> None:
            encoded = self.text_encoder(states)
            for timestep in range(3):
                self.transformer(encoded, torch.tensor(timestep))

    pipeline = Pipeline(Part(), Part(), DDIMScheduler())
    with record(pipeline, tmp_path / "default") as recording:
        pipeline()
    assert (recording.seen, recording.kept) == (8, 6)
    data = load(tmp_path / "default")
    assert_good(data)
    assert {call.origin.module for call in data} == {
        "transformer.inner.layers.0",
        "transformer.inner.layers.1",
    }
    assert {call.origin.phase for call in data} == {"denoise"}
    assert data.captures[0].model == "Pipeline"
    phases = Counter[str]()
    for row in data.captures[0].census["rows"]:
        phases[row["phase"]] += row["calls"]
    assert phases == {"encode": 2, "denoise": 6}

    with record(pipeline, tmp_path / "chosen", modules="text_encoder.*, *.layers.1") as recording:
        pipeline()
    assert {call.origin.module for call in load(tmp_path / "chosen")} == {
        "text_encoder.inner.layers.0",
        "text_encoder.inner.layers.1",
        "transformer.inner.layers.1",
    }


def test_a_glob_that_matches_no_module_is_refused_before_the_run(
    layers: nn.Module, tmp_path: Path
) -> None:
    with (
        pytest.raises(CaptureError, match=r"no module matches 'attn\*'; available: "),
        record(layers, tmp_path, modules="attn*"),
    ):
        pytest.fail("ran")


def test_a_glob_that_matches_no_caller_names_the_callers(
    layers: nn.Module, states: Tensor, tmp_path: Path
) -> None:
    with (
        pytest.warns(RecordingWarning, match=r"none of the 2 attention calls came .*layers\.0, "),
        record(layers, tmp_path, modules="*.qkv"),
    ):
        layers(states)
    assert list(tmp_path.iterdir()) == []


def test_calls_outside_the_watched_modules_are_said_to_be_outside(
    layers: nn.Module, tmp_path: Path
) -> None:
    query = torch.randn(1, 2, 5, 8)
    with (
        pytest.warns(RecordingWarning, match=r"came from: \(outside all watched modules\)"),
        record(layers, tmp_path),
    ):
        F.scaled_dot_product_attention(query, query, query)


def test_a_model_that_made_no_call_is_told_what_to_look_for(
    layers: nn.Module, tmp_path: Path
) -> None:
    with (
        pytest.warns(RecordingWarning, match="another attention kernel directly"),
        record(layers, tmp_path),
    ):
        pass


def test_eager_attention_is_named(tmp_path: Path) -> None:
    model = tiny_llama(attn_implementation="eager")
    with (
        pytest.warns(RecordingWarning, match="it uses attn_implementation='eager'; load it with"),
        record(model, tmp_path),
    ):
        model(torch.arange(5)[None])


def test_a_left_padded_batch_with_a_static_cache(tmp_path: Path) -> None:
    model = tiny_llama()
    tokens = torch.arange(12).view(2, 6) + 2
    padding = torch.ones(2, 6, dtype=torch.long)
    padding[1, :3] = 0
    with record(model, tmp_path, max=20) as recording:
        model.generate(
            tokens,
            attention_mask=padding,
            max_new_tokens=4,
            min_new_tokens=4,
            do_sample=False,
            pad_token_id=0,
            cache_implementation="static",
        )
    data = load(tmp_path)
    assert len(data) == recording.seen == 8
    assert_good(data)
    assert {call.origin.phase for call in data} == {"prefill", "decode"}


def test_a_compiled_model_is_recorded_whole(
    layers: nn.Module, states: Tensor, tmp_path: Path
) -> None:
    torch._dynamo.reset()
    graphs: list[Any] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(layers, backend=backend)
    with torch.no_grad():
        expected = compiled(states)
        compilations = len(graphs)
        with record(compiled, tmp_path) as recording:
            for _ in range(3):
                output = compiled(states)
        assert torch.equal(output, expected)
        assert recording.seen == 6
        assert {call.origin.module for call in load(tmp_path)} == {"layers.0", "layers.1"}
        assert torch.equal(compiled(states), expected)
    assert len(graphs) == compilations


def test_two_threads_with_two_models(
    make_layers: MakeLayers, states: Tensor, tmp_path: Path
) -> None:
    models = {"left": make_layers(2), "right": make_layers(2)}
    with record(models, tmp_path, max=6) as recording:
        threads = [
            threading.Thread(target=lambda model=model: [model(states) for _ in range(30)])
            for model in models.values()
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert (recording.seen, recording.kept) == (120, 6)
    data = load(tmp_path)
    assert len(data) == len(list(tmp_path.glob("*.safetensors"))) == 6
    assert_good(data)
    for call in data:
        side, _, path = call.origin.module.partition(".")
        layer = models[side].get_submodule(path)
        # The tensors are those of the module named: its projection of this input.
        if path == "layers.0":
            with torch.no_grad():
                expected = layer.qkv(states).view(1, 5, 3, 2, 8)[:, :, 0].transpose(1, 2)
            assert torch.equal(call.query, expected)


@pytest.mark.timeout(30)
def test_threads_that_go_on_after_the_recording_are_left_alone(
    make_layers: MakeLayers, states: Tensor, tmp_path: Path
) -> None:
    model = make_layers(2)
    stop = threading.Event()
    failures: list[BaseException] = []

    def go_on() -> None:
        try:
            while not stop.is_set():
                model(states)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=go_on)
    with record(model, tmp_path, max=50) as recording:
        thread.start()
        while recording.seen < 20:
            time.sleep(0.001)
    seen = recording.seen
    data = load(tmp_path)
    assert_good(data)
    for _ in range(20):
        model(states)
    stop.set()
    thread.join(10)
    assert not thread.is_alive()
    assert not failures
    assert recording.seen == seen
    assert_good(load(tmp_path))


def test_what_has_no_values_is_counted_and_never_kept(tmp_path: Path) -> None:
    ragged = torch.nested.nested_tensor(
        [torch.randn(3, 2, 8), torch.randn(5, 2, 8)], layout=torch.jagged
    ).transpose(1, 2)
    query = torch.randn(4, 2, 5, 8)
    meta = torch.randn(1, 2, 5, 8, device="meta")
    strange = [
        attend(ragged, ragged, ragged),
        lambda: torch.vmap(F.scaled_dot_product_attention)(query, query, query),
        attend(meta, meta, meta),
    ]
    model = Caller()
    for name, call in zip(("nested", "vmap", "meta"), strange, strict=True):
        with (
            pytest.warns(RecordingWarning, match="none of the 1 attention calls can be stored"),
            record(model, tmp_path / name),
        ):
            model(call)
    with record(model, tmp_path / "all") as recording:
        model(*strange, attend(query, query, query))
    assert (recording.seen, recording.kept) == (4, 1)
    assert_good(load(tmp_path / "all"))


def test_fake_tensors_are_counted_and_never_kept(tmp_path: Path) -> None:
    from torch._subclasses import FakeTensorMode

    model = Caller()

    def run() -> None:
        query = torch.randn(1, 2, 5, 8)
        model(attend(query, query, query))

    with (
        pytest.warns(RecordingWarning, match="can be stored"),
        record(model, tmp_path),
        FakeTensorMode(),
    ):
        run()


def test_a_call_that_fails_is_not_counted(tmp_path: Path) -> None:
    """A model may retry with smaller pieces: what failed holds no place among those kept."""
    query = torch.randn(1, 2, 5, 8)

    def fails() -> Tensor:
        with pytest.raises(RuntimeError):
            F.scaled_dot_product_attention(query, query[..., :4], query)
        return query

    calls = [fails, attend(query, query, query)] * 10
    data = recorded(tmp_path, *calls, max=3)
    assert len(data) == len(list(tmp_path.glob("*.safetensors"))) == 3
    assert data.captures[0].calls_seen == 10
    assert_good(data)


def test_somebody_s_replacement_is_named_as_the_backend(
    layers: nn.Module, states: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def their_attention(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        return TORCH_SDPA(query, key, value, **options)

    with monkeypatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", their_attention)
        with record(layers, tmp_path):
            layers(states)
    backend = load(tmp_path)[0].origin.backend
    assert backend.endswith("their_attention")
    assert_good(load(tmp_path))


@pytest.mark.parametrize(
    ("backend", "name"),
    [("MATH", "torch-math"), ("FLASH_ATTENTION", "torch-flash")],
)
def test_the_backend_is_recorded(
    layers: nn.Module, states: Tensor, tmp_path: Path, backend: str, name: str
) -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(getattr(SDPBackend, backend)), record(layers, tmp_path):
        layers(states)
    data = load(tmp_path)
    assert {call.origin.backend for call in data} == {name}
    others = {"torch-math", "torch-flash", "torch-efficient", "torch-cudnn"} - {name}
    assert [set(call.origin.disabled_backends) for call in data] == [others] * len(data)
    assert {finding.text for finding in verify(data)} == {"intact; output bit-identical"}


def test_the_weights_are_not_claimed_to_be_what_nobody_said(tmp_path: Path) -> None:
    model = tiny_llama()
    with record(model, tmp_path / "a"):
        model(torch.arange(5)[None])
    assert load(tmp_path / "a").captures[0].weights == "not stated"
    model.name_or_path = "somebody/model"
    with record(model, tmp_path / "b"):
        model(torch.arange(5)[None])
    assert load(tmp_path / "b").captures[0].weights == "somebody/model (its name_or_path)"


# Several captures in one directory.


def run(model: Any, states: Tensor, out: Path, name: str, **options: Any) -> Recording:
    with record(model, out, name=name, **options) as recording:
        model(states)
    return recording


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_a_second_model_adds(layers: nn.Module, states: Tensor, tmp_path: Path) -> None:
    run(layers, states, tmp_path, "zebra")
    first = contents(tmp_path)
    run(layers, states, tmp_path, "antelope")
    data = load(tmp_path)
    assert_good(data)
    assert [entry.origin.model for entry in data.entries] == ["zebra"] * 2 + ["antelope"] * 2
    assert [capture.model for capture in data.captures] == ["zebra", "antelope"]
    for name in first.keys() - {MANIFEST}:
        assert contents(tmp_path)[name] == first[name]


@pytest.mark.parametrize("name", ["zebra", "zebra!", "-zebra-"])
def test_the_same_model_is_refused(
    layers: nn.Module, states: Tensor, tmp_path: Path, name: str
) -> None:
    run(layers, states, tmp_path, "zebra")
    before = contents(tmp_path)
    remedy = "`overwrite=True`" if name == "zebra" else "rename this one"
    with pytest.raises(CaptureError, match=f"already contains a capture of zebra: .*{remedy}"):
        run(layers, states, tmp_path, name)
    assert contents(tmp_path) == before


def test_overwrite_replaces_only_that_model(
    layers: nn.Module, make_layers: MakeLayers, states: Tensor, tmp_path: Path
) -> None:
    run(layers, states, tmp_path, "zebra")
    run(layers, states, tmp_path, "antelope")
    before = contents(tmp_path)
    run(make_layers(1), states + 1, tmp_path, "zebra", overwrite=True)
    data = load(tmp_path)
    assert_good(data)
    assert Counter(entry.origin.model for entry in data.entries) == {"antelope": 2, "zebra": 1}
    assert sorted(contents(tmp_path)) == [
        "antelope-000000.safetensors",
        "antelope-000001.safetensors",
        MANIFEST,
        "zebra_2-000000.safetensors",
    ]
    assert contents(tmp_path)["zebra_2-000000.safetensors"] != before["zebra-000000.safetensors"]


def test_a_failing_run_that_records_nothing_deletes_nothing(
    layers: nn.Module, states: Tensor, tmp_path: Path
) -> None:
    run(layers, states, tmp_path, "zebra")
    before = contents(tmp_path)
    with pytest.raises(ZeroDivisionError), record(layers, tmp_path, name="zebra", overwrite=True):
        raise ZeroDivisionError
    with pytest.warns(RecordingWarning), record(layers, tmp_path, name="zebra", overwrite=True):
        pass
    assert contents(tmp_path) == before


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_what_an_interrupted_run_recorded_is_readable(
    layers: nn.Module, states: Tensor, tmp_path: Path, error: type[BaseException]
) -> None:
    with pytest.raises(error), record(layers, tmp_path):  # noqa: PT012
        layers(states)
        raise error
    data = load(tmp_path)
    assert len(data) == 2
    assert not data.captures[0].complete
    assert_good(data)


def test_a_rebuilt_directory_takes_another_capture(
    layers: nn.Module, states: Tensor, tmp_path: Path
) -> None:
    run(layers, states, tmp_path, "zebra")
    (tmp_path / MANIFEST).unlink()
    run(layers, states, tmp_path, "antelope")
    data = load(tmp_path)
    assert data.note == ""
    assert len(data) == 4
    assert [bool(capture.census) for capture in data.captures] == [False, True]


@pytest.mark.parametrize("below", ["x", "x/y"])
def test_a_directory_that_cannot_be_made_is_named(
    layers: nn.Module, tmp_path: Path, below: str
) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(CaptureError, match=r"cannot write to .*; choose another with `out=`"),
        record(layers, tmp_path / "file" / below),
    ):
        pytest.fail("ran")


def test_a_full_disk_is_told_once_and_the_model_goes_on(
    make_layers: MakeLayers, states: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    model = make_layers(8)
    expected = model(states)
    monkeypatch.setattr("capture.storage.call_file.write_safetensors", full)

    def run_recorded() -> tuple[list[Tensor], Recording]:
        with record(model, tmp_path, max=5) as recording:
            return [model(states) for _ in range(3)], recording

    with pytest.warns(RecordingWarning, match="No space left on device") as warned:
        outputs, recording = run_recorded()
    assert all(torch.equal(output, expected) for output in outputs)
    assert len(warned) == len(recording.problems) == 1
    assert recording.kept == 0
    assert recording.seen == 24
    assert list(tmp_path.iterdir()) == []
    assert F.scaled_dot_product_attention is TORCH_SDPA


def test_a_nested_recording_is_refused_and_writes_nothing(
    layers: nn.Module, states: Tensor, tmp_path: Path
) -> None:
    with record(layers, tmp_path / "outer"):
        with (
            pytest.raises(RuntimeError, match="already intercepted"),
            record(layers, tmp_path / "inner"),
        ):
            pytest.fail("ran")
        layers(states)
    assert not (tmp_path / "inner").exists()
    assert_good(load(tmp_path / "outer"))


def test_settings_are_kept(layers: nn.Module, states: Tensor, tmp_path: Path) -> None:
    settings = {"prompt": "a panda", "steps": 2, "size": None}
    run(layers, states, tmp_path, "zebra", settings=settings)
    manifest = json.loads((tmp_path / MANIFEST).read_text())
    assert manifest["captures"][0]["settings"] == settings


def test_a_call_is_what_the_package_exports() -> None:
    import capture

    assert capture.AttentionCall is AttentionCall
    with pytest.raises(AttributeError, match="no attribute 'recrod'"):
        capture.recrod  # noqa: B018


def test_two_captures_of_a_model_do_not_write_to_one_directory_at_once(
    layers: nn.Module, tmp_path: Path
) -> None:
    capture = CaptureRecord("Layers", "random")
    other = Target.check(tmp_path, "Layers", overwrite=False).begin(capture)
    with pytest.raises(CaptureError, match="another capture of Layers is writing"):  # noqa: SIM117
        with record(layers, out=tmp_path):
            pytest.fail("ran")
    other.close()


def test_captures_of_two_models_into_one_directory_at_once(
    layers: nn.Module, states: Tensor, tmp_path: Path, make_call: Callable[..., AttentionCall]
) -> None:
    """Neither reads a manifest that the other is about to replace."""
    with record(layers, tmp_path, name="zebra"):
        layers(states)
        other = Target.check(tmp_path, "antelope", overwrite=False)
        journal = other.begin(CaptureRecord("antelope", "random"))
        call = PackedCall.of(make_call(model="antelope"))
        journal.append(**call.write(tmp_path / "antelope-000000.safetensors").to_json())
    assert "antelope is still being recorded" in load(tmp_path).note
    assert other.end(CaptureRecord("antelope", "random", complete=True)) == []
    data = load(tmp_path)
    assert data.note == ""
    assert Counter(entry.origin.model for entry in data.entries) == {"antelope": 1, "zebra": 2}
