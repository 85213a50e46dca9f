"""A plan's type of device is compared with the devices of a model."""

import pytest
import torch

from replay.plan.plan_device import measured_on, types_at_hand
from replay.rows.row import Machine

CPU, FIRST, SECOND = (torch.device(each) for each in ("cpu", "cuda:0", "cuda:1"))


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """An H100 and an H200; the first is the current device."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(
        "torch.cuda.get_device_name", lambda device: "H200" if device.index == 1 else "H100"
    )


@pytest.mark.parametrize(
    ("machine", "device"),
    [
        (Machine("NVIDIA H200", cuda="13.0"), "NVIDIA H200"),
        (Machine("AMD EPYC", threads="8"), "cpu"),
        (Machine(), ""),
    ],
)
def test_rows_say_what_they_were_measured_on(machine: Machine, device: str) -> None:
    assert measured_on(machine) == device


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("devices", "types"),
    [
        ({FIRST}, ["H100"]),
        ({SECOND}, ["H200"]),
        ({FIRST, SECOND}, ["H100", "H200"]),
        ({CPU, SECOND}, ["H200"]),
        ({CPU}, ["cpu", "H100"]),
        (set(), ["cpu", "H100"]),
    ],
)
def test_a_model_runs_where_its_weights_are(devices: set[torch.device], types: list[str]) -> None:
    """Modules on the CPU may be offloaded."""
    assert types_at_hand(devices) == types
