"""Our own kernels as the replay runs them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are compiled here")
@pytest.mark.parametrize(
    "place", [pytest.param((), marks=pytest.mark.slow, id="worker"), ("--in-process",)]
)
def test_recorded_calls_are_checked_and_never_timed(
    place: tuple[str, ...],
    recorded: Path,
    run_cli: Callable[..., tuple[int, str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The whole command, and a worker that interprets Triton."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    code, out, err = run_cli(
        *("--dir", str(recorded), "--device", "cpu", "--json", "-", "--check"),
        *("--kernels", "triton-fa2,torch-math", "--rounds", "3"),
        *place,
    )
    assert code == 0, err
    found = [json.loads(line) for line in out.splitlines()]
    ours = [row for row in found if row["kernel"] == "triton-fa2"]
    assert len(ours) == 3
    for row in ours:
        assert row["status"] == "not-timed"
        assert row["reason"].startswith("Triton's interpreter ran it; max abs error")
        assert row["accuracy"]["captured"]
        assert row["time_ms"] is None
        assert row["first_call_ms"] is None
        assert row["speedup"] is None
