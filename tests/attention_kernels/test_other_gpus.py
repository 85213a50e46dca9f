"""Kernels compile for the untried GPUs that docs/attention-kernels.md lists."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import results
from benchmarks.attention_kernels.other_gpus import KERNELS, SHARED_KIB


@pytest.mark.slow
def test_kernels_compile_where_the_table_says_so(tmp_path: Path) -> None:
    """Only one head dimension and the smallest shared memory are tested, because compiling is
    slow."""
    capability, out = "8.6", tmp_path / "found.csv"
    command = [sys.executable, "-m", "benchmarks.attention_kernels.other_gpus", "--out", str(out)]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    subprocess.run(
        [*command, "--capability", capability, "--head-dim", "128"], env=environment, check=True
    )
    said = {
        row["kernel"]: row["result"]
        for row in results.read(results.DIRECTORY / "other_gpus.csv")
        if (row["compute capability"], row["head_dim"]) == (capability, "128")
    }
    with out.open(newline="") as file:
        assert {row["kernel"]: row["result"] for row in csv.DictReader(file)} == said


def test_the_table_has_every_kernel_and_capability() -> None:
    rows = results.read(results.DIRECTORY / "other_gpus.csv")
    found = {(row["compute capability"], row["kernel"]) for row in rows}
    assert found == {(capability, kernel) for capability in SHARED_KIB for kernel in KERNELS}
