"""Shapes that this machine cannot replay are refused before the replay starts."""

from dataclasses import replace

import pytest
import torch

from replay.bench import feasibility
from replay.bench.feasibility import check_size
from replay.workloads.call_sizes import ShapeError
from replay.workloads.random_calls import suite
from replay.workloads.random_masks import MASKS

CPU = torch.device("cpu")


def test_shape_too_large_is_refused_with_one_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    specs = suite("sage", "float32")

    def machine(gigabytes: float, flops_per_second: float) -> None:
        monkeypatch.setattr(feasibility, "available_bytes", lambda device: int(gigabytes * 1e9))
        monkeypatch.setattr(feasibility, "cpu_flops_per_second", lambda: flops_per_second)

    machine(1000, 1e18)
    check_size(specs, CPU, kernels=4)

    for gigabytes, flops_per_second in ((8, 1e18), (1000, 1e12)):  # too little memory; too slow
        machine(gigabytes, flops_per_second)
        with pytest.raises(ShapeError, match=r"--max-seq \d+ fits") as refused:
            check_size(specs, CPU, kernels=4)
        fits = int(str(refused.value).split("--max-seq ")[1].split()[0])
        assert 1024 <= fits < 32768
        check_size(suite("sage", "float32", longest=fits), CPU, kernels=4)
        with pytest.raises(ShapeError):
            check_size(suite("sage", "float32", longest=2 * fits), CPU, kernels=4)

    machine(0.5, 1e18)
    with pytest.raises(ShapeError, match="even the shortest, 1024 long, does not fit"):
        check_size(specs, CPU, kernels=4)


@pytest.mark.parametrize("mask", MASKS)
def test_mask_memory_is_counted(monkeypatch: pytest.MonkeyPatch, mask: str) -> None:
    """A mask of 2 ** 32 pairs takes 4 GiB and is held three times; everything else takes 1 GiB."""
    spec = replace(suite("sage", "float16")[0], q_len=2**16, kv_len=2**16, mask=mask, batch=1)
    spec = replace(spec, q_heads=1, kv_heads=1)
    monkeypatch.setattr(feasibility, "available_bytes", lambda device: 8 * 2**30)
    monkeypatch.setattr(feasibility, "cpu_flops_per_second", lambda: 1e18)
    if mask in ("none", "padding"):  # a padding mask has only one row of keys
        check_size([spec], CPU, kernels=1)
        return
    with pytest.raises(ShapeError, match="does not fit"):
        check_size([spec], CPU, kernels=1)
