"""Kernels compile for the untried GPUs that docs/attention-kernels.md lists."""

import json
import os
import subprocess
import sys

import pytest

from benchmarks import results
from benchmarks.attention_kernels.other_gpus import KERNELS, SHARED_KIB

COMPILE = """
import json
from benchmarks.attention_kernels import other_gpus
other_gpus.KERNELS = ("triton-sage", "triton-fp8", "triton-varlen", "triton-decode")
print(json.dumps(other_gpus.compile_for("8.6", 128)))
"""


@pytest.mark.slow
def test_kernels_compile_where_the_table_says_so() -> None:
    """Compiling is slow, so only some kernels, one head dimension and little memory are tried."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", COMPILE]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    rows = results.read(results.DIRECTORY / "other_gpus.csv")
    place = ("compute capability", "kernel", "head_dim")
    said = {tuple(row[each] for each in place): row["result"] for row in rows}
    found = json.loads(done.stdout)
    assert len(found) == 4
    for row in found:
        assert row["result"] == said[tuple(row[each] for each in place)]


def test_the_table_has_every_kernel_and_capability() -> None:
    rows = results.read(results.DIRECTORY / "other_gpus.csv")
    found = {(row["compute capability"], row["kernel"]) for row in rows}
    assert found == {(capability, kernel) for capability in SHARED_KIB for kernel in KERNELS}
