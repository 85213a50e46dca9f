"""`record` is used as a library, with models of every kind."""

import copy
import math
import pickle
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from capture import load, record
from capture.cli.file_checks import check_files
from capture.hooks.interceptor import TORCH_SDPA
from tests.capture.hooks.test_modules import Denoiser
from tests.capture.recording.callers import Caller, MakeLayers, assert_good, attend


def test_model_s_calls_come_back(layers: nn.Module, states: Tensor, tmp_path: Path) -> None:
    expected = layers(states)
    with record(layers, tmp_path, name="mine", weights="random", seed=3) as recording:
        output = layers(states)
        layers(states)
        assert recording.seen == recording.kept == 4
    assert repr(recording) == f"Recording(out={str(tmp_path)!r}, model='mine', kept=4, seen=4)"
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
    # The strides reveal views of one projection of 3 × 16.
    assert first.query.stride() == first.key.stride() == (5 * 48, 8, 48, 1)
    assert (first.origin.model, first.origin.weights, first.origin.seed) == ("mine", "random", 3)
    assert first.origin.backend == "torch-flash"
    assert first.origin.disabled_backends == []
    assert first.origin.device == "cpu"
    assert first.origin.versions["torch"] == torch.__version__
    [capture] = data.captures
    assert capture.complete
    assert (capture.calls_seen, capture.sample, capture.modules) == (4, "spread", "*")


def test_inference_mode(layers: nn.Module, states: Tensor, tmp_path: Path) -> None:
    with torch.inference_mode(), record(layers, tmp_path):
        layers(states)
    assert_good(load(tmp_path))


@pytest.mark.parametrize(
    ("option", "wrong"),
    [
        ("sample", ["random", "every:", "every:0", "every:-2", "first:2"]),
        ("max", [0, 2.5, math.nan, math.inf, "3", True]),
        ("max_bytes", [0, "1G"]),
        ("buffer_bytes", [0, -1, "1G"]),
        ("seed", [-1, "3"]),
        ("rank", [-1, 1.5, "0"]),
        ("heads", [3, "0,2"]),
    ],
)
def test_wrong_limits_are_refused_before_anything_runs(
    layers: nn.Module, tmp_path: Path, option: str, wrong: list[Any]
) -> None:
    for value in wrong:
        message = rf"^{option} must be .*, not {re.escape(repr(value))}$"
        options: dict[str, Any] = {option: value}
        with pytest.raises(ValueError, match=message), record(layers, tmp_path, **options):
            pytest.fail("ran")


def test_limits_may_be_integers_of_numpy(layers: nn.Module, states: Tensor, tmp_path: Path) -> None:
    one: Any = np.int64(1)
    with record(layers, tmp_path, max=one, seed=one, buffer_bytes=one << 20) as recording:
        layers(states)
    assert recording.kept == 1
    assert load(tmp_path)[0].origin.seed == 1


def test_compiled_model_is_recorded_whole(
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


def test_program_s_replacement_is_named_as_the_backend(
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
    ("backend", "name"), [("MATH", "torch-math"), ("FLASH_ATTENTION", "torch-flash")]
)
def test_backend_is_recorded(
    layers: nn.Module, states: Tensor, tmp_path: Path, backend: str, name: str
) -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(getattr(SDPBackend, backend)), record(layers, tmp_path):
        layers(states)
    data = load(tmp_path)
    assert {call.origin.backend for call in data} == {name}
    others = {"torch-math", "torch-flash", "torch-efficient", "torch-cudnn"} - {name}
    assert [set(call.origin.disabled_backends) for call in data] == [others] * len(data)
    assert {finding.text for finding in check_files(data)} == {"intact; output bit-identical"}


def test_nested_recording_is_refused_and_writes_nothing(
    layers: nn.Module, states: Tensor, tmp_path: Path
) -> None:
    with record(layers, tmp_path / "outer"):
        with (
            pytest.raises(RuntimeError, match="already intercepted; end that recording, leave"),
            record(layers, tmp_path / "inner"),
        ):
            pytest.fail("ran")
        layers(states)
    assert not (tmp_path / "inner").exists()
    data = load(tmp_path / "outer")
    assert len(data) == 2
    assert_good(data)


@pytest.mark.parametrize("sizes", [(5, 5), (3, 5), (5, 3)])
@pytest.mark.parametrize("kind", ["causal_upper_left", "causal_lower_right"])
def test_causal_bias_is_stored_as_causality(
    tmp_path: Path, kind: str, sizes: tuple[int, int]
) -> None:
    from torch.nn.attention import bias

    query, key = (torch.randn(1, 2, size, 8) for size in sizes)
    mask = getattr(bias, kind)(*sizes)
    expected = F.scaled_dot_product_attention(query, key, key, attn_mask=mask)
    model = Caller()
    with record(model, tmp_path):
        [output] = model(attend(query, key, key, attn_mask=mask))
    assert torch.equal(output, expected)
    [call] = load(tmp_path)
    assert call.attn_mask is None
    assert call.is_causal
    assert call.variant.bottom_right == (kind == "causal_lower_right" and sizes[0] != sizes[1])


@pytest.mark.parametrize("sample", ["first", "hard"])
def test_gradients_under_selective_checkpointing_stay_the_same(sample: str, tmp_path: Path) -> None:
    """Checkpointing identifies operators by their order, so a recording must not add any."""
    from torch.utils import checkpoint

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> Any:
        saved = operator in (torch.ops.aten.bmm.default, torch.ops.aten.view.default)
        policies = checkpoint.CheckpointPolicy
        return policies.MUST_SAVE if saved else policies.PREFER_RECOMPUTE

    class Checkpointed(nn.Module):
        def forward(self, states: Tensor) -> Any:
            return checkpoint.checkpoint(
                self.attend,
                states,
                use_reentrant=False,
                context_fn=lambda: checkpoint.create_selective_checkpoint_contexts(policy),
            )

        def attend(self, states: Tensor) -> Tensor:
            heads = states.view(4, 2, 5, 8).sigmoid()
            output = F.scaled_dot_product_attention(heads, heads, heads).view(8, 5, 8)
            return torch.bmm(output, output.mT).sigmoid().view(4, 2, 5, 5).exp()

    states = torch.randn(8, 5, 8, requires_grad=True)
    model = Checkpointed()
    [expected] = torch.autograd.grad(model(states).sum(), states)
    with record(model, tmp_path, sample=sample) as recording:
        [gradient] = torch.autograd.grad(model(states).sum(), states)
    assert torch.equal(gradient, expected)
    assert recording.kept == 1
    assert not recording.problems


def test_default_device_is_the_model_s_alone(
    layers: nn.Module, states: Tensor, tmp_path: Path
) -> None:
    with record(layers, tmp_path) as recording, torch.device("meta"):
        layers(states)
    assert recording.kept == 2
    with torch.device("meta"):
        data = load(tmp_path)
        assert {call.query.device.type for call in data} == {"cpu"}
    assert_good(data)


def test_model_is_copied_and_pickled_without_hooks(
    layers: nn.Module, states: Tensor, tmp_path: Path
) -> None:
    expected, pickled = layers(states), pickle.dumps(layers)
    with record(layers, tmp_path) as recording:
        assert pickle.dumps(layers) == pickled
        copies = [copy.deepcopy(layers), pickle.loads(pickled)]
        assert all(torch.equal(each(states), expected) for each in copies)
        assert recording.kept == 0
        layers(states)
    assert recording.kept == len(load(tmp_path)) == 2


@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_model_is_exported_inside_the_block(
    strict: bool, layers: nn.Module, states: Tensor, tmp_path: Path
) -> None:
    length = torch.export.Dim("length", min=2, max=64)
    with record(layers, tmp_path) as recording:
        exported = torch.export.export(
            layers, (states,), dynamic_shapes={"states": {1: length}}, strict=strict
        )
        expected = layers(states)
    assert torch.equal(exported.module()(states), expected)
    assert recording.kept == 2
    assert not recording.problems


@pytest.mark.slow  # the tracer imports SymPy
def test_trace_for_many_sizes_has_no_values(tmp_path: Path) -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    model, query = Caller(), torch.randn(1, 2, 5, 8)
    with record(model, tmp_path) as recording:
        make_fx(lambda each: model(attend(each, each, each)), tracing_mode="symbolic")(query)
        model(attend(query, query, query))
    assert (recording.kept, recording.counts.traced, recording.problems) == (1, 1, [])


def test_all_denoisers_of_a_pipeline_are_sampled_unless_modules_are_chosen(
    make_layers: MakeLayers, states: Tensor, tmp_path: Path
) -> None:
    class Pipeline:
        def __init__(self) -> None:
            self.components = {
                "text_encoder": make_layers(),
                "transformer": Denoiser(make_layers()),
                "transformer_2": Denoiser(make_layers()),
                "tokenizer": None,
            }

        def __call__(self) -> None:
            encoded = self.components["text_encoder"](states)
            for step in range(6):
                name = "transformer" if step < 3 else "transformer_2"
                self.components[name](encoded, torch.tensor(step))

    pipeline = Pipeline()
    with record(pipeline, tmp_path / "default", max=8) as recording:
        pipeline()
    data = load(tmp_path / "default")
    assert_good(data)
    kept = Counter(call.origin.module.partition(".")[0] for call in data)
    assert kept == {"transformer": 4, "transformer_2": 4}
    assert recording.summary == (
        "kept of the eligible calls: transformer: 4 of 6, transformer_2: 4 of 6; "
        "not sampled: text_encoder 2"
    )
    [capture] = data.captures
    assert capture.model == "Pipeline"
    assert capture.modules == "transformer,transformer.*,transformer_2,transformer_2.*"
    phases = Counter[str]()
    for row in capture.census["rows"]:
        phases[row["phase"]] += row["calls"]
    assert phases == {"encode": 2, "denoise": 12}

    with record(pipeline, tmp_path / "chosen", modules="text_encoder.*, *.layers.1"):
        pipeline()
    assert {call.origin.module for call in load(tmp_path / "chosen")} == {
        "text_encoder.layers.0",
        "text_encoder.layers.1",
        "transformer.inner.layers.1",
        "transformer_2.inner.layers.1",
    }


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_calls_are_counted_and_never_kept(
    layers: Any, states: Tensor, tmp_path: Path, reentrant: bool
) -> None:
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers.layers

        def forward(self, states: Any) -> Any:
            for layer in self.layers:
                # Non-reentrant checkpointing stops once it has all tensors, here at the square.
                states = checkpoint(
                    lambda x, layer=layer: layer(x).square(), states, use_reentrant=reentrant
                )
            return states

    model = Checkpointed()
    states.requires_grad_()
    with record(model, tmp_path) as recording:
        for _ in range(2):
            model(states).sum().backward()
    assert (recording.seen, recording.kept, recording.missed_attention) == (8, 4, [])
    data = load(tmp_path)
    assert {call.origin.phase for call in data} == {"encode"}
    assert sorted(
        (row["module"], row["phase"], row["calls"], row["first_step"], row["last_step"])
        for row in data.captures[0].census["rows"]
    ) == [
        (f"layers.{layer}", phase, 2, 0, 1)
        for layer in range(2)
        for phase in ("encode", "recompute")
    ]
    assert recording.summary.endswith("4 of 4; not sampled: (recompute) 4")


def test_model_whose_attributes_cannot_be_read_is_recorded(tmp_path: Path) -> None:
    class Raising(nn.Module):
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError(f"not initialised: {name}")

        def forward(self, states: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(states, states, states)

    model = Raising()
    with record(model, tmp_path) as recording:
        model(torch.randn(1, 2, 5, 8))
    assert (recording.kept, recording.problems) == (1, [])
