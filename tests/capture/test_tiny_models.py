"""The built-in tiny models, recorded by the command and checked by a process without our code."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F

from capture import load
from capture.cli.file_checks import check_files
from capture.storage.dataset import Dataset
from models import pretrained_weights

pytestmark = pytest.mark.slow

STEPS = {"cogvideo": 4, "flux": 4, "llama": 8}

# Runs each model without `capture`: a replaced function records its arguments, and PyTorch's
# profiler counts the operator.
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
    """Return the description of the default tiny model's weights."""
    if pretrained_weights.directory(name):
        return f"built-in, trained; model card models/pretrained/{name}/README.md"
    return "random, seed 0 (built-in tiny configuration)"


class Recorded(NamedTuple):
    """A recorded model, and an independent process's observations."""

    name: str
    directory: Path
    count: int
    notes: list[dict[str, Any]]


@pytest.fixture(scope="module")
def noted(
    tmp_path_factory: pytest.TempPathFactory, start_python: Callable[..., subprocess.Popen[str]]
) -> dict[str, Any]:
    """Observations of each model by an independent process."""
    directory = tmp_path_factory.mktemp("noted")
    independent = start_python("-c", INDEPENDENT, json.dumps(STEPS), cwd=directory)
    printed, errors = independent.communicate(timeout=200)
    assert independent.returncode == 0, errors
    found: dict[str, Any] = json.loads(printed.partition("FOUND")[2])
    return found


@pytest.fixture(scope="module", params=STEPS)
def recorded(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, noted: dict[str, Any]
) -> Recorded:
    from capture.cli.main import main

    name: str = request.param
    directory = tmp_path_factory.mktemp("recorded") / "captured_inputs"
    out, short = io.StringIO(), ["--size", "tiny", "--steps", str(STEPS[name])]
    with contextlib.redirect_stdout(out), pytest.raises(SystemExit) as stopped:
        main(["--model", name, *short, "--device", "cpu", "--out", str(directory)])
    assert stopped.value.code == 0
    assert out.getvalue().startswith("recorded 10 of ")
    return Recorded(name, directory, noted[name]["count"], noted[name]["notes"])


@pytest.fixture(scope="module")
def data(recorded: Recorded) -> Dataset:
    return load(recorded.directory)


def test_exactly_ten_files_and_every_call_counted(recorded: Recorded, data: Dataset) -> None:
    assert len(list(recorded.directory.glob(f"{recorded.name}-*.safetensors"))) == 10
    [capture] = data.captures
    assert capture.model == recorded.name
    rows = capture.census["rows"]
    assert capture.complete
    assert sum(row["kept"] for row in rows) == 10
    assert sum(row["calls"] for row in rows) == capture.calls_seen == recorded.count
    assert len(recorded.notes) == recorded.count


def test_tensors_are_the_model_s_own(recorded: Recorded, data: Dataset) -> None:
    """Sizes, strides, dtypes and values of each call equal the other process's observations."""
    calls = list(data)
    assert len(calls) == 10
    for call in calls:
        noted = recorded.notes[call.origin.call_index]
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
    assert {finding.text for finding in check_files(data)} == {"intact; output bit-identical"}


def test_what_is_kept_is_what_matters(recorded: Recorded, data: Dataset) -> None:
    origins = [entry.origin for entry in data.entries]
    assert {origin.weights for origin in origins} == {weights(recorded.name)}
    assert len({origin.module for origin in origins}) >= 2
    if recorded.name == "llama":
        assert {origin.phase for origin in origins} == {"prefill", "decode"}
        return
    assert {origin.phase for origin in origins} == {"denoise"}
    assert {origin.module.split(".")[0] for origin in origins} == {"transformer"}
    steps = {
        row["first_step"] + offset
        for row in data.captures[0].census["rows"]
        if row["phase"] == "denoise"
        for offset in range(row["last_step"] - row["first_step"] + 1)
    }
    kept = {origin.step for origin in origins}
    assert kept <= steps
    assert len(kept) == min(len(origins), len(steps))


def test_show_and_verify(recorded: Recorded, run_cli: Callable[..., tuple[int, str, str]]) -> None:
    code, out, err = run_cli("show", str(recorded.directory))
    assert (code, err) == (0, "")
    assert f"{recorded.name} · 10 of " in out
    assert weights(recorded.name) in " ".join(out.split())
    code, out, _ = run_cli("check", str(recorded.directory))
    assert code == 0
    assert out.endswith("10 of 10 files passed\n")


def test_all_recorded_into_one_directory(
    run_cli: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    names = ["flux", "llama"]
    for name in names:
        short = ("--size", "tiny", "--steps", str(STEPS[name]), "--device", "cpu")
        assert run_cli("--model", name, *short, "--out", str(tmp_path))[0] == 0
    assert [capture.model for capture in load(tmp_path).captures] == names
    code, out, _ = run_cli("show", str(tmp_path))
    assert code == 0
    for name in names:
        assert f"{name} · 10 of " in out
    assert run_cli("check", str(tmp_path))[1].endswith("20 of 20 files passed\n")
