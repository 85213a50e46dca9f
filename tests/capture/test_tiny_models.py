"""The built-in tiny models, recorded by the command and checked by a process that knows us not."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from capture import load
from capture.cli.verify import verify
from capture.storage.dataset import Dataset
from models import pretrained_weights

MODELS = ["cogvideo", "flux", "llama"]
STEPS = {"cogvideo": 4, "flux": 4, "llama": 8}

# Runs each model without `capture`: the function replaced by hand notes what it is given, and
# PyTorch's profiler counts the operator itself.
INDEPENDENT = """
import json, sys
import torch, torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile
import models

original = F.scaled_dot_product_attention
notes = []

def describe(tensor):
    return None if tensor is None else {
        "size": list(tensor.shape), "stride": list(tensor.stride()), "dtype": str(tensor.dtype),
        "sum": tensor.double().sum().item(),
    }

def note(query, key, value, attn_mask=None, *rest, **options):
    output = original(query, key, value, attn_mask, *rest, **options)
    tensors = {"query": query, "key": key, "value": value, "attn_mask": attn_mask, "output": output}
    notes.append({name: describe(tensor) for name, tensor in tensors.items()})
    return output

found = {}
for name, steps in json.loads(sys.argv[1]).items():
    runnable = models.load(name, size="tiny", device="cpu", steps=steps)
    notes.clear()
    F.scaled_dot_product_attention = note
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        runnable.run()
    F.scaled_dot_product_attention = original
    operator = "aten::scaled_dot_product_attention"
    count = sum(event.count for event in profiled.key_averages() if event.key == operator)
    found[name] = {"count": count, "notes": list(notes)}
assert "capture" not in sys.modules
print("FOUND" + json.dumps(found))
"""


def weights(name: str) -> str:
    """What a recording says of the weights of the tiny model that is built unasked."""
    if pretrained_weights.directory(name):
        return f"built-in, trained; model card models/pretrained/{name}/README.md"
    return "random, seed 0 (built-in tiny configuration)"


@pytest.fixture(scope="module")
def recorded_and_noted(
    tmp_path_factory: pytest.TempPathFactory,
    start_python: Callable[..., subprocess.Popen[str]],
) -> tuple[Path, dict[str, Any]]:
    """All three recorded into one directory; and what the independent process found."""
    from capture.cli.main import main

    noted = tmp_path_factory.mktemp("noted")
    independent = start_python("-c", INDEPENDENT, json.dumps(STEPS), cwd=noted)
    directory = tmp_path_factory.mktemp("recorded") / "captured_inputs"
    for name in MODELS:
        out, short = io.StringIO(), ["--size", "tiny", "--steps", str(STEPS[name])]
        with contextlib.redirect_stdout(out), pytest.raises(SystemExit) as stopped:
            main(["--model", name, *short, "--device", "cpu", "--out", str(directory)])
        assert stopped.value.code == 0
        assert out.getvalue().startswith("recorded 10 of ")
    printed, errors = independent.communicate(timeout=200)
    assert independent.returncode == 0, errors
    return directory, json.loads(printed.partition("FOUND")[2])


@pytest.fixture(scope="module")
def data(recorded_and_noted: tuple[Path, dict[str, Any]]) -> Dataset:
    return load(recorded_and_noted[0])


@pytest.mark.parametrize("name", MODELS)
def test_exactly_ten_files_and_every_call_counted(
    recorded_and_noted: tuple[Path, dict[str, Any]], data: Dataset, name: str
) -> None:
    directory, found = recorded_and_noted
    assert len(list(directory.glob(f"{name}-*.safetensors"))) == 10
    [capture] = [capture for capture in data.captures if capture.model == name]
    rows = capture.census["rows"]
    assert capture.complete
    assert sum(row["kept"] for row in rows) == 10
    assert sum(row["calls"] for row in rows) == capture.calls_seen == found[name]["count"]
    assert len(found[name]["notes"]) == found[name]["count"]


@pytest.mark.parametrize("name", MODELS)
def test_tensors_are_the_model_s_own(
    recorded_and_noted: tuple[Path, dict[str, Any]], data: Dataset, name: str
) -> None:
    """Call by call: sizes, strides, dtypes and values as the other process saw them."""
    notes = recorded_and_noted[1][name]["notes"]
    calls = [entry.load() for entry in data.entries if entry.origin.model == name]
    assert len(calls) == 10
    for call in calls:
        noted = notes[call.origin.call_index]
        tensors = call.tensors()
        assert tensors.keys() == {field for field, note in noted.items() if note is not None}
        for field, tensor in tensors.items():
            assert list(tensor.shape) == noted[field]["size"]
            assert list(tensor.stride()) == noted[field]["stride"]
            assert str(tensor.dtype) == noted[field]["dtype"]
            scale = tensor.double().abs().sum().item()
            assert tensor.double().sum().item() == pytest.approx(
                noted[field]["sum"], abs=1e-5 * scale + 1e-9
            )


def test_sdpa_repeats_every_output_bit_for_bit(data: Dataset) -> None:
    with torch.no_grad():
        for call in data:
            again = F.scaled_dot_product_attention(**call.arguments())
            assert call.output is not None
            assert torch.equal(again, call.output)
    assert {finding.text for finding in verify(data)} == {"intact; output bit-identical"}


def test_what_is_kept_is_what_matters(data: Dataset) -> None:
    by_model = {
        name: [entry for entry in data.entries if entry.origin.model == name] for name in MODELS
    }
    for name in ("cogvideo", "flux"):
        assert {entry.origin.phase for entry in by_model[name]} == {"denoise"}
        assert {entry.origin.module.split(".")[0] for entry in by_model[name]} == {"transformer"}
        steps = {
            row["first_step"] + offset
            for capture in data.captures
            if capture.model == name
            for row in capture.census["rows"]
            if row["phase"] == "denoise"
            for offset in range(row["last_step"] - row["first_step"] + 1)
        }
        kept = {entry.origin.step for entry in by_model[name]}
        assert kept <= steps
        assert len(kept) == min(len(by_model[name]), len(steps))
    assert {entry.origin.phase for entry in by_model["llama"]} == {"prefill", "decode"}
    for name, entries in by_model.items():
        assert {entry.origin.weights for entry in entries} == {weights(name)}
        assert len({entry.origin.module for entry in entries}) >= 2


def test_show_and_verify(
    recorded_and_noted: tuple[Path, dict[str, Any]],
    run_cli: Callable[..., tuple[int, str, str]],
) -> None:
    directory = str(recorded_and_noted[0])
    code, out, err = run_cli("--show", directory)
    assert (code, err) == (0, "")
    printed = " ".join(out.split())
    for name in MODELS:
        assert f"{name} · 10 of " in out
        assert weights(name) in printed
    code, out, _ = run_cli("--verify", directory)
    assert code == 0
    assert out.endswith("30 of 30 files passed\n")
