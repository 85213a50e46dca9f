"""Announcement, disk estimate and progress of `capture --model`."""

from __future__ import annotations

import io
import shutil
from pathlib import Path
from types import SimpleNamespace as Namespace
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

from capture import record
from capture.cli.announcement import DiskEstimate, announcement
from capture.recording.run_progress import StepTimes, shown_progress, steps


@pytest.mark.parametrize(
    ("extent", "size"),
    [
        (
            {"width": 720, "height": 480, "frames": 49, "steps": 50},
            "49 frames of 720×480 pixels, 50 steps, ",
        ),
        ({"height": 480, "steps": 1}, "1 step, "),
        ({"prompt_tokens": 1024, "new_tokens": 8}, "1,024 prompt tokens, 8 new tokens, "),
        ({}, ""),
    ],
)
def test_announcement_has_the_known_sizes_and_the_dtype_of_most_weights(
    extent: dict[str, int], size: str
) -> None:
    roots = {"vae": nn.Linear(2, 2), "transformer": nn.Linear(9, 9, dtype=torch.bfloat16)}
    runnable: Any = Namespace(extent=extent, roots=roots, weights="random, seed 0")
    said = f"mine: {size}bfloat16 on cpu\nweights: random, seed 0"
    assert announcement("mine", runnable) == said


@pytest.mark.parametrize(
    ("max_calls", "options", "expected"),
    [
        (10, {}, "about 12.8 kB for up to 10 calls of 1.3 kB"),
        (10, {"backward": True}, "about 25.6 kB for up to 10 calls of 2.6 kB"),
        (1, {}, "about 1.3 kB for up to 1 call of 1.3 kB"),
        (10, {"max_bytes": 5000}, "about 5.0 kB for up to 10 calls of 1.3 kB"),
        ("per-layer", {}, "about 2.6 kB for the first phase's 2 calls"),
    ],
)
def test_size_is_estimated_after_the_first_pass_and_compared_with_the_free_space(
    max_calls: int | str,
    options: dict[str, Any],
    expected: str,
    layers: nn.Module,
    states: Tensor,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for free, fits in ((10**6, True), (1000, False)):
        monkeypatch.setattr(shutil, "disk_usage", lambda path, free=free: Namespace(free=free))
        console, out = Console(file=io.StringIO(), width=100), tmp_path / str(free)
        with record(layers, out=out, max=max_calls, **options) as recording:
            limit = options.get("max_bytes")
            recording.watch(DiskEstimate(recording, max_calls, limit, out, console))
            assert not console.file.getvalue()  # type: ignore[attr-defined]
            for _ in range(3):
                layers(states)
        printed = console.file.getvalue()  # type: ignore[attr-defined]
        assert printed.startswith(f"disk: {expected} (1.0 {'MB' if fits else 'kB'} free)\n")
        assert printed.count("\n") == 1
        assert ("may not fit" in capsys.readouterr().err) is not fits


def test_remaining_time_is_that_of_the_steps_so_far() -> None:
    times = StepTimes()
    assert times.left(0, 6, 1.0) is None
    assert times.left(1, 6, 3.0) is None
    assert times.left(1, 6, 9.0) is None
    assert times.left(2, 6, 13.0) == 5 * 10.0
    assert times.left(2, 6, 16.0) == 5 * 10.0 - 3.0
    assert times.left(4, 6, 23.0) == pytest.approx(3 * 20 / 3)
    assert times.left(6, 6, 33.0) == 6.0
    assert times.left(6, 6, 99.0) == 0.0


@pytest.mark.parametrize(
    ("extent", "pipeline", "expected"),
    [
        ({"new_tokens": 4}, None, (0, 4)),
        ({}, None, (0, None)),
        ({"steps": 10}, Namespace(), (3, None)),  # the scheduler is not set up yet
        ({"steps": 10}, Namespace(num_timesteps=19), (3, 19)),  # two evaluations for most steps
    ],
)
def test_scheduler_gives_the_number_of_steps(
    extent: dict[str, int], pipeline: Any, expected: tuple[int, int | None], tmp_path: Path
) -> None:
    class Denoiser(nn.Module):
        def forward(self, states: Tensor, timestep: Tensor) -> Tensor:
            return nn.functional.scaled_dot_product_attention(states, states, states)

    model = Denoiser()
    with record(model, out=tmp_path / "out", max=1) as recording:
        for step in range(3):
            model(torch.ones(1, 1, 2, 4), torch.tensor([step]))
        assert steps(Namespace(extent=extent, pipeline=pipeline), recording) == expected


@pytest.mark.parametrize("shown", [True, False])
def test_progress_is_shown_only_on_a_terminal(
    shown: bool, layers: nn.Module, states: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    console = Console(file=io.StringIO(), force_terminal=shown, width=80)
    runnable: Any = Namespace(extent={"new_tokens": 3}, pipeline=None)
    monkeypatch.setattr("capture.recording.run_progress.steps", lambda *_: (3, 3))
    monkeypatch.setattr(StepTimes, "left", lambda *_: 0.0)
    with (
        record(layers, out=tmp_path / "out", max=4) as recording,
        shown_progress(runnable, recording, 4, console),
    ):
        layers(states)
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    found = "finishing after token 3 of 3 · 2 of 4 calls kept, 2.6 kB"
    assert (found in printed, bool(printed)) == (shown, shown)
    assert "…" not in printed
