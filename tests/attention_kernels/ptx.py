"""Compile kernels for Hopper without a GPU, and search the compiled programs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

COMPILE = """
from dataclasses import replace
import torch
from benchmarks.attention_kernels.other_gpus import as_if_on
from capture.call.attention_variant import AttentionVariant
from replay.kernels.registry import find
from replay.workloads.random_calls import Spec

def empty(*shape, dtype):
    return torch.empty(shape, dtype=dtype, device="meta")

call = replace(Spec(*{sizes}, is_causal={is_causal}).without_values(), {fields})
with as_if_on("9.0"), torch.no_grad():
    find({kernel!r}).attention(**call.arguments())
"""


def compiled_for_hopper(
    directory: Path,
    kernel: str,
    sizes: tuple[int, ...],
    program: str,
    *,
    is_causal: bool = False,
    fields: str = "",
) -> Path:
    """Compile a kernel in another process, which needs no GPU, and return the file of a program.

    Args:
        directory: an empty folder, which becomes Triton's cache.
        sizes: sizes of the call (B, Hq, Hkv, Sq, Sk, D, Dv).
        fields: further fields of the call, as the source of keyword arguments.
    """
    script = COMPILE.format(sizes=sizes, is_causal=is_causal, fields=fields, kernel=kernel)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=environment | {"TRITON_CACHE_DIR": str(directory)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (found,) = directory.rglob(f"{program}.ptx")
    return found


def unfenced_arrivals(program: str) -> list[str]:
    """Return arrivals at a barrier in a compiled program while loads from shared memory may be
    under way.

    TMA waits for such an arrival and then writes where the loads read. Neither the arrival nor
    barriers before it keep TMA from overtaking the loads. Only a fence does.
    """
    under_way, found = False, []
    for line in program.splitlines():
        if re.search(r"\tldmatrix|\tld\.shared\.(v\d\.)?b(16|32)", line):
            under_way = True
        elif "fence.proxy.async" in line:
            under_way = False
        elif "mbarrier.arrive.shared" in line and under_way:
            found.append(line.strip())
    return found
