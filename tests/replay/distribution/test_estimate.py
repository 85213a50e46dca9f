"""The expected duration of a replay, and the history of earlier ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from replay.api.session import Session
from replay.bench.settings import Settings
from replay.distribution.estimate import (
    SECONDS_TO_NOTE,
    History,
    Rates,
    call_seconds,
    expected_seconds,
    flops,
    together,
)
from replay.kernels.registry import find
from replay.rows.row import Machine, Row, Status
from replay.timing.flops import flops as exact_flops
from replay.workloads.random_calls import Spec
from replay.workloads.workload import random_workload
from tests.factories import made_workload

RATES = Rates(flops=1e12, reference_flops=1e11, sample_seconds=1e-4, kernel_seconds=0.1)


@pytest.mark.parametrize("is_causal", [False, True])
def test_operations_are_known_before_a_call_is_read(is_causal: bool) -> None:
    spec = Spec(2, 4, 2, 512, 512, 64, 32, is_causal)
    found = flops(random_workload("a", "b", spec, 0).source.metadata())
    assert found == pytest.approx(exact_flops(spec.without_values()), rel=0.01)


def test_calls_with_more_to_do_take_longer(quick: Settings) -> None:
    settings = replace(quick, rounds=30, max_seconds=5.0)
    kernels = {"this": [find("torch-math"), find("torch-flash")], "other": [find("torch-math")]}
    calls = [
        random_workload(str(length), "b", Spec(1, 8, 8, length, length, 128, 128), 0)
        for length in (1024, 4096)
    ]
    unknown = made_workload("unknown", lambda device: pytest.fail("loaded"))
    found = expected_seconds([*calls, unknown], kernels, settings, RATES)
    assert list(found) == ["1024", "4096", "unknown"]
    assert found["4096"] > found["1024"] > 3 * RATES.kernel_seconds
    assert found["unknown"] == pytest.approx((found["1024"] + found["4096"]) / 2)
    fewer = expected_seconds(calls, {"this": kernels["this"][:1]}, settings, RATES)
    assert fewer["4096"] < found["4096"]
    assert expected_seconds([unknown], kernels, settings, RATES) == {"unknown": 1.0}


def test_limit_of_rounds_limits_the_estimate(quick: Settings) -> None:
    def seconds(flops: float, **changes: float) -> float:
        settings = replace(quick, **{"rounds": 30, "max_seconds": 20.0, **changes})  # type: ignore[arg-type]
        return call_seconds(flops, 1, settings, RATES)

    second = RATES.flops  # the limit applies to a run
    assert seconds(second, max_seconds=10.0) < seconds(second)
    assert seconds(second, rounds=6) == pytest.approx(seconds(second, max_seconds=1.0))
    assert seconds(second, calls_before=4) > seconds(second)


def test_devices_share_several_calls_but_not_one() -> None:
    assert together([4.0, 2.0, 2.0], 1) == 8.0
    assert together([4.0, 2.0, 2.0], 2) == 4.0
    assert together([6.0, 1.0], 2) == 6.0
    assert together([], 2) == 0.0


def test_history_is_kept_by_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    file = tmp_path / "attention-replay" / "pace.json"
    h200, l4 = Machine("H200"), Machine("L4")
    cpu = [Machine("a processor", threads=threads) for threads in ("2", "8")]
    history = History()
    assert history.scale([h200]) is None
    history.note([h200], 2.0, SECONDS_TO_NOTE - 1)
    assert not file.exists()
    history.note([h200], 2.0, SECONDS_TO_NOTE)
    history.note([l4], 3.0, 100.0)
    history.note([h200], 2.5, 100.0)
    history.note([cpu[0]], 1.5, 100.0)
    found = [History().scale([machine]) for machine in (h200, l4, *cpu)]
    assert found == [2.5, 3.0, 1.5, None]
    for harm in ("{", "[]", '{"H200": "x"}', '{"H200": -1}'):
        file.write_text(harm)
        assert history.scale([h200]) is None


def test_unwritable_history_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "attention-replay").write_text("in the way")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    History().note([Machine("H200")], 2.0, 100.0)
    assert History().scale([Machine("H200")]) is None
    monkeypatch.delenv("XDG_STATE_HOME")
    assert ".local/state" in str(History()._path)


@pytest.mark.parametrize(("status", "noted"), [("ok", 1), ("timeout", 0)])
def test_hung_replay_is_not_noted(
    run_cli: Callable[..., tuple[int, str, str]],
    recorded: Path,
    monkeypatch: pytest.MonkeyPatch,
    status: Status,
    noted: int,
) -> None:
    """Otherwise the next `--max-time` would leave out nearly all calls."""
    measured, found = Session._measured, []

    def some(*arguments: Any, **options: Any) -> Iterator[Row]:
        for row in measured(*arguments, **options):
            yield replace(row, status=status) if row.call.name.endswith("1") else row

    monkeypatch.setattr(Session, "_measured", some)
    monkeypatch.setattr(History, "note", lambda *those: found.append(those))
    quick = ("--rounds", "3", "--device", "cpu", "--in-process")
    run_cli("--dir", str(recorded), *quick, "--kernels", "torch-math")
    assert len(found) == noted


def test_rates_of_a_processor_are_measured(
    quick: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("replay.distribution.estimate.cpu_flops_per_second", lambda: 8e9)
    rates = Rates.of(quick.device)
    assert (rates.flops, rates.reference_flops) == (4e9, 4e9)


def test_reference_takes_less_than_the_kernels(
    quick: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On two cores, the reference took 4 of 180 seconds with fifteen calls and four kernels."""
    monkeypatch.setattr("replay.distribution.estimate.cpu_flops_per_second", lambda: 2e11)
    settings, rates = replace(quick, rounds=30, max_seconds=1.0), Rates.of(quick.device)
    alone = call_seconds(9e9, 0, settings, rates)
    assert alone < call_seconds(9e9, 4, settings, rates) / 15
