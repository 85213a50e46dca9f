"""Choosing GPUs, and the processor cores and lock of each GPU."""

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from replay.distribution import device_slots
from replay.distribution.device_slots import Device, DeviceError, gpus, held, held_if_free

CPU = torch.device("cpu")

Host = Callable[..., None]


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    """`host(…)` simulates GPUs and two-thread cores; the second threads are numbered last."""

    def make(*kinds: str, cores: int = 8, visible: str | None = None) -> None:
        found = [SimpleNamespace(name=kind, uuid=f"u{place}") for place, kind in enumerate(kinds)]
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(kinds))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(kinds))
        monkeypatch.setattr(torch.cuda, "get_device_properties", found.__getitem__)
        cpus = set(range(2 * cores))
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: cpus, raising=False)
        monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cpus: None, raising=False)
        siblings = [[core, core + cores] for core in range(cores)]
        monkeypatch.setattr(device_slots, "core_siblings", lambda cpus: siblings)
        if visible is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        else:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    return make


def test_every_gpu_gets_its_own_cores(host: Host) -> None:
    host("H200", "H200", "H200", cores=8)
    found = gpus("all")
    assert [str(each) for each in found] == ["GPU 0 (GPU-u0)", "GPU 1 (GPU-u1)", "GPU 2 (GPU-u2)"]
    assert [each.variables["CUDA_VISIBLE_DEVICES"] for each in found] == ["0", "1", "2"]
    assert [sorted(each.cpus) for each in found] == [
        [0, 1, 8, 9],
        [2, 3, 4, 10, 11, 12],
        [5, 6, 7, 13, 14, 15],
    ]


def test_gpus_are_numbered_as_in_pytorch(host: Host) -> None:
    host("H200", "H200", visible="5, GPU-abc")
    assert [each.variables["CUDA_VISIBLE_DEVICES"] for each in gpus("1,0")] == ["GPU-abc", "5"]


def test_one_gpu_keeps_all_cores(host: Host) -> None:
    host("H200", "H200", cores=1)
    assert gpus("1")[0].cpus == frozenset()


@pytest.mark.parametrize(
    ("asked", "kinds", "cores", "reason"),
    [
        ("0", [], 8, "finds no GPU here"),
        ("7", ["H200", "H200"], 8, "there is no GPU 7 here, only 0 to 1"),
        ("0,x", ["H200"], 8, "invalid GPU 'x'"),
        ("²", ["H200"], 8, "invalid GPU '²'"),
        ("", ["H200"], 8, "invalid GPU ''"),
        ("0,00", ["H200", "H200"], 8, "GPU 0 is named twice"),
        ("all", ["H200", "L4"], 8, "H200, L4 are not compared in one replay"),
        ("all", ["L4"] * 3, 2, "3 GPUs need a processor core each, and there are 2"),
    ],
)
def test_invalid_gpus_are_refused(
    host: Host, asked: str, kinds: list[str], cores: int, reason: str
) -> None:
    host(*kinds, cores=cores)
    with pytest.raises(DeviceError, match=reason):
        gpus(asked)


def test_device_is_held_by_one_replay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    one, other = (Device(f"GPU {index}", "H200", f"GPU-{index}") for index in range(2))
    taken = pytest.raises(DeviceError, match="another replay is measuring on GPU 0: wait")
    with held([one]), held([other]), taken:
        held([one]).__enter__()
    with held([one, other]), held([Device("CPU", "a processor")]):
        pass
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o666}


def test_device_lock_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: Host) -> None:
    host("H200", "H200")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    zero, one = gpus("all")
    with held_if_free(torch.device("cuda")) as trouble:
        assert trouble == ""
        with held([zero]), pytest.raises(DeviceError, match="on GPU 1"):
            held([one]).__enter__()
        with held_if_free(torch.device("cuda:1")) as trouble:
            assert trouble == "another replay is measuring on GPU 1: wait for it, or name another"
        with held_if_free(torch.device("cuda:0")) as trouble, held_if_free(CPU) as on_cpu:
            assert (trouble, on_cpu) == ("", "")


def test_lock_follows_no_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "attention-replay-GPU-0.lock").symlink_to(tmp_path / "precious")
    with pytest.raises(DeviceError, match="cannot lock GPU 0"):
        held([Device("GPU 0", "H200", "GPU-0")]).__enter__()
    assert not (tmp_path / "precious").exists()
