"""The command records the built-in tiny models."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from capture import load
from capture.storage.dataset import Dataset
from models import pretrained_weights
from tests.capture.recording.callers import assert_good

pytestmark = pytest.mark.slow

STEPS = {"cogvideo": 4, "flux": 4, "llama": 8}


def weights(name: str) -> str:
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


def test_ten_calls_are_kept_counted_and_repeatable(recorded: Recorded, data: Dataset) -> None:
    assert len(list(recorded.directory.glob(f"{recorded.name}-*.safetensors"))) == len(data) == 10
    [capture] = data.captures
    assert (capture.model, capture.complete) == (recorded.name, True)
    assert_good(data)
    assert all(call.output is not None for call in data)


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
