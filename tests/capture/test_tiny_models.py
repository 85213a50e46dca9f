"""The command records the built-in tiny models."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F

from capture import load
from capture.cli.file_checks import check_files
from capture.storage.dataset import Dataset
from models import pretrained_weights

pytestmark = pytest.mark.slow

STEPS = {"cogvideo": 4, "flux": 4, "llama": 8}


def weights(name: str) -> str:
    """Return the description of the default tiny model's weights."""
    if pretrained_weights.directory(name):
        return f"built-in, trained; model card models/pretrained/{name}/README.md"
    return "random, seed 0 (built-in tiny configuration)"


class Recorded(NamedTuple):
    """Dataset of a model, with the command's output."""

    name: str
    directory: Path


@pytest.fixture(scope="module", params=STEPS)
def recorded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    from capture.cli.main import main

    name: str = request.param
    directory = tmp_path_factory.mktemp("recorded") / "captured_inputs"
    out, short = io.StringIO(), ["--size", "tiny", "--steps", str(STEPS[name])]
    with contextlib.redirect_stdout(out), pytest.raises(SystemExit) as stopped:
        main(["--model", name, *short, "--device", "cpu", "--out", str(directory)])
    assert stopped.value.code == 0
    assert out.getvalue().startswith("recorded 10 of ")
    return Recorded(name, directory)


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
    assert sum(row["calls"] for row in rows) == capture.calls_seen


def test_sdpa_repeats_every_output_bit_for_bit(data: Dataset) -> None:
    with torch.no_grad():
        for call in data:
            again = F.scaled_dot_product_attention(**call.arguments())
            assert call.output is not None
            assert torch.equal(again, call.output)
    assert {finding.text for finding in check_files(data)} == {"intact; output bit-identical"}


def test_kept_calls_cover_phases_and_steps(recorded: Recorded, data: Dataset) -> None:
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
