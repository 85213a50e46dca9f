"""A kernel's energy is measured over a block of calls, each with its own inputs."""

from __future__ import annotations

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

    def measured(
        run: Callable[[], Tensor], device: torch.device, call_ms: float, keep: Callable[..., None]
    ) -> EnergyBlock:
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
    assert first.energy is not None
    assert first.energy.tflops_per_w == pytest.approx(flops / 0.2 / 1e12)
    assert (first.energy.mj, first.energy.power_w, first.energy.seconds) == (200.0, 500.0, 1.1)
    assert (first.burst_ms, first.sustained_ms) == (1.0, 1.1)
    assert (rows["steady"].burst_ms, rows["steady"].sustained_ms) == (None, None)
    assert rows["steady"].energy == first.energy
    assert rows["uncounted"].flags == ("no energy: the counter stands still",)
    assert rows["leaves"].flags == ("no energy: SystemExit: 0",)
    assert [rows[name].status for name in names] == ["ok"] * 4


def test_energy_is_withheld_for_reused_results(
    replayed: Replayed, kernels: Register, monkeypatch: pytest.MonkeyPatch
) -> None:
    call, steady = random_call(kv_len=100), EnergyBlock(200.0, 500.0, 1.1, 1.0, 1.0)
    recorded = {name: tensor.clone() for name, tensor in call.tensors().items()}
    seen: list[Tensor] = []
    in_block = False

    def measured(run: Callable[[], Tensor], *_: object) -> EnergyBlock:
        nonlocal in_block
        keep, in_block = _[-1], True
        assert callable(keep)
        for _call in range(50):
            result = run()
            seen.append(call.value.clone())
            keep(result)
        in_block = False
        return steady

    kept: dict[int, Tensor] = {}

    def caches(**arguments: Any) -> Tensor:
        if not in_block:
            return sdpa(**arguments)
        return kept.setdefault(arguments["value"].data_ptr(), sdpa(**arguments)).clone()

    def halves(**arguments: Any) -> Tensor:
        output = sdpa(**arguments)
        return output.half() if in_block else output

    def mutates(**arguments: Any) -> Tensor:
        output = sdpa(**arguments)
        arguments["key"].add_(1.0)
        return output

    monkeypatch.setattr("replay.bench.energy_rows.measure_energy", measured)
    chosen = {"honest": sdpa, "caches": caches, "halves": halves, "mutates": mutates}
    rows = replayed(
        call, *(kernels(name, attention) for name, attention in chosen.items()), energy=True
    )
    assert rows["honest"].status == "ok"
    assert rows["honest"].energy is not None
    assert len({value.numpy().tobytes() for value in seen[:50]}) == 50
    wrong = "right when it was checked, wrong when its energy was measured: "
    assert (rows["caches"].status, rows["caches"].reason[: len(wrong)]) == ("inaccurate", wrong)
    assert rows["halves"].status == "error"
    assert rows["halves"].reason.endswith("when its energy was measured")
    assert rows["mutates"].energy is None
    assert "no energy: it changes its inputs" in rows["mutates"].flags
    assert all(torch.equal(tensor, recorded[name]) for name, tensor in call.tensors().items())
