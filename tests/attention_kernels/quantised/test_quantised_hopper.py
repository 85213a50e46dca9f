"""Machine code of the 8-bit prefill for Hopper, without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.attention_kernels.ptx import unfenced_arrivals

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")
from attention_kernels.hopper.pipeline import CONSUMERS_NAMED
from attention_kernels.quantised.quantised_hopper import tile_for

COMPILE = """
import torch
from benchmarks.attention_kernels.other_gpus import as_if_on
from replay.kernels.registry import find
from replay.workloads.random_calls import Spec

spec = Spec(1, {group}, 1, {kv_len}, {kv_len}, {head_dim}, {head_dim})
with as_if_on("9.0"), torch.no_grad():
    find("triton-fp8").attention(**spec.without_values().arguments())
"""


@pytest.mark.slow
@pytest.mark.parametrize(("head_dim", "group", "kv_len"), [(64, 4, 1024), (128, 1, 1024)])
def test_there_are_no_barriers_but_those_in_use(
    head_dim: int, group: int, kv_len: int, tmp_path: Path
) -> None:
    """The memory of unused barriers is used for outputs too, and a GPU that is shared may overwrite
    it."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = COMPILE.format(head_dim=head_dim, group=group, kv_len=kv_len)
    subprocess.run(
        [sys.executable, "-c", script],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        check=True,
    )
    (program,) = tmp_path.rglob("quantised_hopper_kernel.ptx")
    tile = tile_for(head_dim, group, kv_len)
    queries = 2 * tile.consumers  # full and empty
    full = 2 * tile.stages  # of keys and of values
    empty = 0 if tile.consumers == CONSUMERS_NAMED else full
    text = program.read_text()
    assert text.count("mbarrier.init") == queries + full + empty
    assert unfenced_arrivals(text) == []
