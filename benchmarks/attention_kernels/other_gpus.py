"""Compiles our Triton kernels for other GPUs (needs no GPU; 10 minutes on two cores).

    python -m benchmarks.attention_kernels.other_gpus [--capability 8.6] [--head-dim 128] ...

Each kernel is called on meta tensors as if they were on such a GPU. The kernel plans and compiles
its programs with Triton's own `ptxas`, but does not launch them. A program that needs more shared
memory than the GPU has counts as an error. Writes `benchmarks/results/other_gpus.csv`, a line for
each kernel and head_dim.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from benchmarks import results
from capture.call.attention_call import AttentionCall
from replay.kernels.registry import find
from replay.workloads.random_calls import Spec

SHARED_KIB = {"8.0": 163, "8.6": 99, "8.9": 99, "9.0": 227, "10.0": 227, "12.0": 99}
"""Maximum shared memory of a program (CUDA C++ Programming Guide, compute capabilities)."""
PREFILL = ("triton-fa2", "triton-fa3", "triton-sage", "triton-fp8", "triton-sage-fp8")
DECODE = (
    "triton-decode",
    "triton-decode-int8",
    "triton-decode-fp8",
    "triton-paged-decode",
    "triton-paged-decode-fp8",
    "triton-sparse-decode",
)
KERNELS = (*PREFILL, "triton-masked", "triton-varlen", "triton-block-sparse", *DECODE)
HeadDims = tuple[int, int]
"""Head dimensions of queries and keys, and of values."""
HEAD_DIMS: tuple[HeadDims, ...] = ((64, 64), (128, 128), (256, 256))
OF_HOPPER: tuple[HeadDims, ...] = ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256))
"""Head dimensions for `triton-fa3`, whose tiles follow the head dimension more closely."""
COLUMNS = ("compute capability", "kernel", "head_dim", "result", "triton")
COMPILES = "compiles"


class _Driver:
    """The parts of a GPU driver that Triton uses before a launch; launching does nothing."""

    def __init__(self, capability: str) -> None:
        major, minor = map(int, capability.split("."))
        self._target = GPUTarget("cuda", 10 * major + minor, 32)
        properties = {"max_shared_mem": SHARED_KIB[capability] * 1024}
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: properties,
            load_binary=lambda *program: (None, None, 0, 0, 1024),
        )

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        return lambda *arguments: None

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target


@contextlib.contextmanager
def as_if_on(capability: str) -> Iterator[None]:
    """Treat `meta` tensors as tensors on a GPU with this compute capability."""
    pair = tuple(map(int, capability.split(".")))
    driver.set_active(_Driver(capability))
    with (
        mock.patch("torch.cuda.is_available", return_value=True),
        mock.patch("torch.cuda.get_device_capability", return_value=pair),
        mock.patch(
            "torch.cuda.get_device_properties",
            return_value=SimpleNamespace(multi_processor_count=132),
        ),
    ):
        yield


def call_of(kernel: str, head_dims: HeadDims) -> AttentionCall:
    """Return a call on meta tensors that the kernel supports."""
    q_len, kv_len = (1, 4096) if kernel in DECODE else (1024, 1024)
    is_causal = kernel in PREFILL
    spec = Spec(1, 8, 2, q_len, kv_len, *head_dims, is_causal, torch.float16)
    call = spec.without_values()
    if kernel == "triton-masked":
        mask = torch.empty((q_len, kv_len), dtype=torch.bool, device="meta")
        return call.with_tensors({"attn_mask": mask})
    if kernel == "triton-varlen":
        lengths = torch.empty(1, dtype=torch.int32, device="meta")
        return replace(call, seqused_k=lengths)
    return call


def compile_for(capability: str, head_dim: int | None) -> list[dict[str, Any]]:
    """Compile all kernels, in a separate process because kernels cache facts about the GPU.

    Args:
        head_dim: head dimension of queries and keys; None for every supported one.
    """
    lines = []
    with as_if_on(capability), torch.no_grad():
        for name in KERNELS:
            for dims in OF_HOPPER if name == "triton-fa3" else HEAD_DIMS:
                if head_dim not in (None, dims[0]):
                    continue
                result = _compile(name, call_of(name, dims))
                written = "/".join(map(str, dict.fromkeys(dims)))
                line = (capability, name, written, result, triton.__version__)
                lines.append(dict(zip(COLUMNS, line, strict=True)))
    return lines


def _compile(name: str, call: AttentionCall) -> str:
    kernel = find(name)
    if reason := kernel.unavailable(torch.device("cuda")) or kernel.refuses(call):
        return reason
    try:
        kernel.attention(**call.arguments())
    except Exception as error:
        return f"{type(error).__name__}: {error}".partition("\n")[0]
    return COMPILES


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--capability", choices=SHARED_KIB, help="default: all")
    choices = [dims[0] for dims in OF_HOPPER]
    parser.add_argument("--head-dim", type=int, choices=choices, help="default: all")
    parser.add_argument("--out", type=Path, default=results.DIRECTORY / "other_gpus.csv")
    arguments = parser.parse_args()
    capabilities = [arguments.capability] if arguments.capability else list(SHARED_KIB)
    with multiprocessing.get_context("spawn").Pool(2, maxtasksperchild=1) as pool:
        each_capability = [(capability, arguments.head_dim) for capability in capabilities]
        found = pool.starmap(compile_for, each_capability, chunksize=1)
    lines = [line for each in found for line in each]
    for line in lines:
        print(*list(line.values())[:4], sep="\t")
    results.write_lines(lines, COLUMNS, arguments.out)


if __name__ == "__main__":
    main()
