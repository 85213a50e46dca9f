"""The first tensors with NaN or infinity in a run, and the last finite output before."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from capture import load, record
from capture.cli.main import main
from capture.hooks.first_nonfinite import FirstNonfinite
from capture.hooks.modules import CallSite, ModuleTracker
from capture.storage.capture_record import CaptureRecord, first_nonfinite
from capture.storage.nonfinite_values import NonfiniteValues, TensorPlace


class InPlace(nn.Sequential):
    """Layers whose result is multiplied by a number in place."""

    def forward(self, states: Tensor, factor: float) -> Tensor:
        return super().forward(states).mul_(factor)


class Block(nn.Module):
    """Attention and an MLP; values at named points can be multiplied by a number."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)
        self.mlp = InPlace(nn.Linear(16, 16), nn.Identity())

    def forward(self, states: Tensor, factors: dict[str, float]) -> Tensor:
        parts = self.qkv(states).view(1, -1, 3, 2, 8).permute(2, 0, 3, 1, 4)
        named = dict(zip(("query", "key", "value"), parts, strict=True))
        given = {name: part * factors.get(name, 1.0) for name, part in named.items()}
        # Other kernels may return finite numbers for infinite scores.
        with sdpa_kernel(SDPBackend.MATH):
            attended = scaled_dot_product_attention(**given, attn_mask=factors.get("mask"))
        states = states + attended.transpose(1, 2).flatten(2)
        changed = self.mlp(states, factors.get("mlp", 1.0))
        return states + (changed.half() * factors.get("half", 1.0)).to(states.dtype)


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, states: Tensor, timestep: int, factors: dict[str, float]) -> list[Tensor]:
        for number, block in enumerate(self.blocks):
            is_spoilt = (timestep, number) == (factors.get("step", 2), 1)
            states = block(states, factors if is_spoilt else {})
        return [states.sigmoid()]


def denoised(model: nn.Module, factors: dict[str, float], steps: int = 4) -> list[Tensor]:
    states, outputs = torch.linspace(-1, 1, 80).view(1, 5, 16), []
    for step in range(steps):
        states = states * factors.get("input", 1.0) if step == 2 else states
        (states,) = model(states, step, factors)
        outputs.append(states)
    return outputs


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return Denoiser().eval()


HUGE, BLOCK, MLP, QKV = 1e38, "that of blocks.0", "that of blocks.1.mlp", "that of blocks.1.qkv"
CASES: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "a tensor of attention": ({"value": math.nan}, "blocks.1: value has NaN", QKV, BLOCK),
    "attention itself": (
        {"query": HUGE, "key": HUGE},
        "blocks.1: attention output has NaN",
        QKV,
        BLOCK,
    ),
    "a mask": (
        {"mask": torch.full((5, 5), math.nan)},
        "blocks.1: attn_mask has NaN",
        QKV,
        BLOCK,
    ),
    "a change in place": (
        {"mlp": math.nan},
        "blocks.1.mlp: output has NaN",
        "that of blocks.1.mlp.0",
        "the attention output of blocks.1",
    ),
    "a cast": ({"half": HUGE}, "blocks.1: output has infinity (NaN from step ", MLP, MLP),
    "the input": ({"input": math.nan}, "Denoiser: input 0 has NaN", "", "output[0] of Denoiser"),
}


@pytest.mark.parametrize(("step", "grad"), [(0, False), (2, False), (2, True)])
@pytest.mark.parametrize("case", CASES)
def test_first_tensor_is_named_and_results_are_unchanged(
    case: str, step: int, grad: bool, model: nn.Module, tmp_path: Path
) -> None:
    factors, first, last_in_first_pass, last = CASES[case]
    step = 2 if case == "the input" else step
    factors, last = {**factors, "step": step}, last if step else last_in_first_pass
    with torch.set_grad_enabled(grad):
        plain = denoised(model, factors)
        with (
            pytest.warns(match="not finite"),
            record(model, tmp_path, modules="*") as recording,
        ):
            watched = denoised(model, factors)
    for one, other in zip(plain, watched, strict=True):
        assert torch.equal(one.view(torch.int32), other.view(torch.int32))
    [capture] = load(tmp_path).captures
    sentence = str(capture.first_nonfinite)
    assert sentence.startswith(f"not finite from step {step} (denoise), {first}"), sentence
    assert f"; the last finite output is {last} at step" in sentence
    assert sentence in recording.summary
    assert CaptureRecord.from_json(capture.to_json()) == capture
    assert not recording.problems


def test_parameter_with_nan_is_named(model: nn.Module, tmp_path: Path) -> None:
    model.blocks[0].qkv.bias.data[3] = math.nan
    with pytest.warns(match="not finite"), record(model, tmp_path, modules="*"):
        denoised(model, {}, steps=1)
    assert first_nonfinite(load(tmp_path).captures) == (
        "not finite from step 0 (denoise), blocks.0.qkv: output has NaN, and so has the module's "
        "parameter bias; no earlier output was seen"
    )


def test_infinity_of_a_mask_and_unwritten_memory_are_ordinary() -> None:
    problems: list[str] = []
    found = FirstNonfinite(ModuleTracker({"model": nn.Identity()}), problems.append)
    query, mask, site = torch.ones(1, 1, 4, 8), torch.zeros(4, 4), CallSite("model")
    mask.fill_(-math.inf)
    found.inputs(site, (query,), {"attention_mask": mask})
    found.attention(site, query, query, query, mask, query)
    found.output(site, {"ids": torch.ones(2).int(), "cache": object(), "x": query * math.inf})
    found.output(site, query)
    found.attention(site, query, query * math.nan, query, None, query * math.nan, is_padded=True)
    values = found.end()
    assert problems == []
    assert values is not None
    assert (values.first.tensor, values.first.holds) == ("output.x", "infinity")
    assert values.first_nan is not None
    assert values.first_nan.tensor == "attention output"
    assert values.last_finite is not None
    assert values.last_finite.tensor == "attention output"  # and not the output after infinity


def test_problem_of_the_search_does_not_reach_the_model(model: nn.Module, tmp_path: Path) -> None:
    plain = denoised(model, {})
    with (
        mock.patch("torch.aminmax", side_effect=RuntimeError("no memory")),
        pytest.warns(match="search for NaN"),
        record(model, tmp_path) as recording,
    ):
        watched = denoised(model, {})
    assert all(map(torch.equal, plain, watched))
    assert recording.problems == ["the search for NaN ended early: RuntimeError: no memory"]
    assert recording.kept == 10


@pytest.mark.parametrize(
    ("sample", "most"),
    [("spread", 2), ("hard", 2), ("first", 2), ("every:3", 2), ("spread", "per-layer")],
)
def test_first_call_with_nan_is_kept_within_the_maximum(
    sample: str,
    most: int | str,
    model: nn.Module,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.warns(match="not finite"), record(model, tmp_path, max=most, sample=sample):
        denoised(model, {"value": math.nan})
    kept = {call.origin.call_index: call.origin.nonfinite for call in load(tmp_path)}
    assert len(kept) == (3 if most == "per-layer" else 2)
    assert kept[7] == "value 80 NaN, output 80 NaN"
    assert sum(map(bool, kept.values())) == (2 if sample == "hard" else 1)
    with pytest.raises(SystemExit):
        main(["show", str(tmp_path)])
    shown = " ".join(capsys.readouterr().out.split())
    assert "not finite from step 2 (denoise), blocks.1: value has NaN" in shown
    assert "blocks.1 (value 80 NaN, output 80 NaN)" in shown


def test_damaged_record_is_refused() -> None:
    place = TensorPlace("model", "output", 0, "encode", 0, "float32", largest=1.0)
    data = NonfiniteValues(replace(place, holds="NaN"), place).to_json()
    for name, damaged in (
        ("first", None),
        ("first", {"module": "model"}),
        ("first", data["last_finite"]),
        ("last_finite", {**data["last_finite"], "largest": None}),
    ):
        with pytest.raises(ValueError, match=r"first|missing|invalid place"):
            NonfiniteValues.from_json({**data, name: damaged})
