"""A kernel's energy is measured over a second of calls."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from replay.timing.energy import EnergyBlock
from replay.timing.gpu_state import NoReading
from tests.factories import random_call
from tests.replay.bench.small_kernels import Register, Replayed, raising, sdpa


def test_energy_is_measured_for_timed_kernels_without_costing_a_row(
    replayed: Replayed, kernels: Register, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes = iter(
        [
            EnergyBlock(mj=200.0, power_w=500.0, seconds=1.1, burst_ms=1.0, sustained_ms=1.1),
            EnergyBlock(mj=200.0, power_w=500.0, seconds=1.1, burst_ms=1.0, sustained_ms=1.01),
            NoReading("the counter stands still"),
            SystemExit(0),
        ]
    )

    def measured(run: Callable[[], Tensor], device: torch.device, call_ms: float) -> EnergyBlock:
        assert run().shape == (1, 2, 9, 32)
        assert call_ms > 0
        outcome = next(outcomes)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    monkeypatch.setattr("replay.bench.energy_rows.measure_energy", measured)
    names = ("slows-down", "steady", "uncounted", "leaves")
    rows = replayed(
        random_call(),
        *(kernels(name, sdpa) for name in names),
        kernels("fails", raising(ValueError("no"))),
        energy=True,
        baseline="slows-down",
    )
    assert next(outcomes, None) is None  # a failed kernel is not run again
    flops = 2 * 2 * 9 * 13 * (32 + 32)
    first = rows["slows-down"]
    assert first.energy.tflops_per_w == pytest.approx(flops / 0.2 / 1e12)
    assert (first.energy.mj, first.energy.power_w, first.energy.seconds) == (200.0, 500.0, 1.1)
    assert (first.burst_ms, first.sustained_ms) == (1.0, 1.1)
    assert (rows["steady"].burst_ms, rows["steady"].sustained_ms) == (None, None)
    assert rows["steady"].energy == first.energy
    assert rows["uncounted"].flags == ("no energy: the counter stands still",)
    assert rows["leaves"].flags == ("no energy: SystemExit: 0",)
    assert [rows[name].status for name in names] == ["ok"] * 4


def test_energy_is_withheld_for_a_kernel_that_changes_its_inputs(
    replayed: Replayed, kernels: Register, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = random_call()
    recorded = {name: tensor.clone() for name, tensor in call.tensors().items()}

    def mutates(**arguments: Any) -> Tensor:
        output = sdpa(**arguments)
        arguments["key"].add_(1.0)
        return output

    monkeypatch.setattr("replay.bench.energy_rows.measure_energy", None)
    row = replayed(call, kernels("mutates", mutates), energy=True)["mutates"]
    assert row.energy is None
    assert "no energy: it changes its inputs" in row.flags
    assert all(torch.equal(tensor, recorded[name]) for name, tensor in call.tensors().items())
