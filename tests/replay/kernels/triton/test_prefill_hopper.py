"""The Hopper kernel without a GPU: that it compiles for one, and what it refuses."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from replay.kernels.registry import find

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")
from replay.kernels.triton import prefill_hopper
from replay.kernels.triton.hopper_pipeline import LOADER_REGISTERS
from replay.kernels.triton.prefill_hopper import _are_loadable, schedule

COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from replay.kernels.triton.prefill_hopper import schedule
from replay.kernels.triton.prefill_hopper_kernel import prefill_kernel

head_dim, is_causal = {head_dim}, True
plan = schedule(head_dim, {group}, {kv_len})

def tiles(rows):
    layout = gl.NVMMASharedLayout.get_default_for([1, 1, rows, head_dim], gl.bfloat16)
    return f"tensordesc<bf16[1, 1, {{rows}}, {{head_dim}}],{{layout!r}}>"

constants = dict(
    CONSUMERS=plan.consumers, HEADS=plan.heads, KEYS=plan.keys, STAGES=plan.stages,
    REGISTERS=plan.registers, IS_CAUSAL=is_causal, HAS_LSE=True,
)
names = prefill_kernel.arg_names
signature = dict.fromkeys(names, "i32") | dict.fromkeys(constants, "constexpr") | dict(
    q_desc=tiles(64), k_desc=tiles(plan.keys), v_desc=tiles(plan.keys), o_desc=tiles(64),
    lse="*fp32", scale="fp32",
)
places = {{(names.index(name),): value for name, value in constants.items()}}
source = GluonASTSource(fn=prefill_kernel, signature=signature, constexprs=places)
kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=dict(num_warps=4))
print(kernel.asm["ptx"])
print("shared", kernel.metadata.shared)
"""


SCHEDULES = [(64, 1, 1024), (64, 4, 1024), (64, 1, 4096), (128, 1, 4096)]
"""head_dim, group and kv_len of calls that are cut up in different ways."""


@pytest.mark.slow
@pytest.mark.parametrize(("head_dim", "group", "kv_len"), SCHEDULES)
def test_it_compiles_for_hopper(head_dim: int, group: int, kv_len: int) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE.format(head_dim=head_dim, group=group, kv_len=kv_len)],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "wgmma.mma_async" in done.stdout
    assert "cp.async.bulk.tensor.4d" in done.stdout
    assert "setmaxnreg.inc" in done.stdout
    shared = int(done.stdout.rpartition("shared")[2])
    assert shared <= 227 * 1024, "more than a multiprocessor gives a block"


@pytest.mark.parametrize(("head_dim", "group", "kv_len"), SCHEDULES)
def test_registers_of_all_warp_groups_fit(head_dim: int, group: int, kv_len: int) -> None:
    plan = schedule(head_dim, group, kv_len)
    threads = 128
    others = (plan.consumers - 1) * plan.registers + LOADER_REGISTERS.value
    left = 65536 // threads - others  # for the consumer that is the kernel's own warps
    assert left >= plan.registers - 8


@pytest.mark.parametrize("group", [1, 2, 3, 4, 7, 8])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_heads_side_by_side_share_their_keys(head_dim: int, group: int) -> None:
    plan = schedule(head_dim, group, kv_len=1024)
    assert group % plan.heads == 0
    assert plan.consumers % plan.heads == 0


@pytest.mark.parametrize("head_dim", [136, 20])
def test_refuses_head_dims(head_dim: int) -> None:
    query = torch.zeros(1, 1, 4, head_dim, dtype=torch.float16)
    with pytest.raises(ValueError, match=f"head_dim {head_dim}"):
        prefill_hopper.prefill_hopper(query, query, query)


def test_refuses_a_negative_scale() -> None:
    query = torch.zeros(1, 1, 4, 64, dtype=torch.float16)
    with pytest.raises(ValueError, match="must not be negative"):
        prefill_hopper.prefill_hopper(query, query, query, scale=-1.0)


def test_what_tma_can_address() -> None:
    tensor = torch.zeros(2, 8, 3, 64, dtype=torch.float16)
    assert _are_loadable(tensor)
    assert _are_loadable(tensor.transpose(1, 2))
    assert not _are_loadable(tensor.mT), "elements of a head must be adjacent"
    assert not _are_loadable(tensor.flatten()[1:-63].view(-1, 1, 1, 64)[:4]), "16 bytes aligned"
    assert not _are_loadable(tensor[:, :, :1].expand(2, 8, 3, 64)), "a stride of 0"
    assert not _are_loadable(torch.zeros(1, 1, 4, 68, dtype=torch.float16)[..., :64]), "odd rows"


def test_says_why_it_cannot_run_here(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = find("triton-fa3")
    if not torch.cuda.is_available():
        assert "needs a CUDA GPU" in str(kernel.unavailable(torch.device("cpu")))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert kernel.unavailable(torch.device("cpu")) == "Gluon has no interpreter"
