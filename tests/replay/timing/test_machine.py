"""The description of the machine, and its measured rate of operations."""

import os
from itertools import accumulate, cycle
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from replay.timing import machine
from replay.timing.cores import core_siblings, physical_cores, usable_cpus
from replay.timing.machine import cpu_flops_per_second, describe


def test_hardware_threads_are_not_counted_as_cores(tmp_path: Path) -> None:
    for cpu, siblings in enumerate(("0,2", "1,3", "0,2", "1,3")):
        folder = tmp_path / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{siblings}\n")
    (tmp_path / "cpufreq").mkdir()
    assert physical_cores(tmp_path) == 2
    assert physical_cores(tmp_path / "absent") is None
    assert core_siblings({0, 1, 2, 3}, tmp_path) == [[0, 2], [1, 3]]
    assert core_siblings({0, 1, 3}, tmp_path) == [[0], [1, 3]]
    assert core_siblings({0, 1}, tmp_path / "absent") == [[0], [1]]


def test_machine_names_usable_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5, 7}, raising=False)
    assert usable_cpus() == 3
    assert describe(torch.device("cpu")).usable_cpus == "3"
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 12)
    assert usable_cpus() == 12


def test_other_load_does_not_lower_the_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of three products are interrupted; with several threads, every product would wait."""
    before = torch.get_num_threads()
    threads: list[int] = []
    clock = accumulate(cycle([0.016, 0.016, 0.001]))

    def perf_counter() -> float:
        threads.append(torch.get_num_threads())
        return next(clock)

    measure = machine._flops_per_second_of_a_thread.__wrapped__  # bypasses the cache
    monkeypatch.setattr(machine, "_flops_per_second_of_a_thread", measure)
    monkeypatch.setattr(machine, "time", SimpleNamespace(perf_counter=perf_counter))
    assert cpu_flops_per_second() == pytest.approx(before * 2 * 512**3 / 0.001)
    assert set(threads) == {1}
    assert torch.get_num_threads() == before
