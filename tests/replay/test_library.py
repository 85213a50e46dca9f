"""Errors for wrong arguments of a program."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import attention_replay as ar
from replay.bench.runner import replay_here
from replay.bench.settings import Settings, SettingsError
from replay.kernels.registry import KernelNameError, select
from replay.workloads.recorded import from_directory
from tests.factories import tiny_llama


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"cache": "foo"}, "cache must be cold or warm, not 'foo'"),
        ({"cache": "cold"}, "a cold cache requires a GPU"),
        ({"max_seconds": -1}, "max_seconds must be a number greater than 0, not -1"),
        ({"max_seconds": float("nan")}, "max_seconds must be a number"),
        ({"max_noise": 7}, "max_noise must be a number greater than 0 and at most 1"),
        ({"calls_before": -1}, "calls_before must be an integer of at least 0, not -1"),
        ({"rounds": 0}, "rounds must be an integer of at least 1, not 0"),
        ({"seed": -1}, "seed must be an integer of at least 0, not -1"),
        ({"device": "gpu"}, "device"),
        ({"device": None}, "device"),
    ],
)
def test_settings_are_checked(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SettingsError, match=sentence):
        Settings(**{"device": "cpu", "cache": "warm", **given})


def test_settings_take_names_of_devices_and_directories() -> None:
    settings = Settings("cpu", "warm", save_output="kept")  # type: ignore[arg-type]
    assert (settings.device, settings.save_output) == (torch.device("cpu"), Path("kept"))
    assert Settings.from_json(settings.to_json()).device == torch.device("cpu")


def test_wrong_arguments_of_a_replay_are_named(recorded: Path) -> None:
    workloads, _ = from_directory(recorded)
    kernels, _ = select("torch-flash")
    settings = Settings("cpu", "warm", rounds=3)  # type: ignore[arg-type]
    wrong: list[tuple[str, tuple[Any, Any, Any]]] = [
        ("expected workloads, got 'x1'", ("x1", kernels, settings)),
        ("expected a workload, got AttentionCall", (ar.load(recorded), kernels, settings)),
        ("expected kernels, got 'torch-flash'", (workloads, "torch-flash", settings)),
        ("expected kernels, got", (workloads, ["torch-flash"], settings)),
        ("expected a Settings object, got None", (workloads, kernels, None)),
    ]
    if not torch.cuda.is_available():
        on_gpu = Settings("cuda", "cold")  # type: ignore[arg-type]
        wrong.append(("PyTorch finds no CUDA device for cuda", (workloads, kernels, on_gpu)))
    for sentence, given in wrong:
        with pytest.raises(SettingsError, match=sentence):
            list(replay_here(*given))


def test_doctor_without_a_kernel_is_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(KernelNameError, match="no kernel is named"),
        ar.doctor(tiny_llama(), kernel=[], out=tmp_path / "out"),
    ):
        pass
    assert not (tmp_path / "out").exists()
