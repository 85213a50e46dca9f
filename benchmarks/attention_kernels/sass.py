"""Compares the machine code of our Triton and Gluon kernels in two trees (needs no GPU).

    python -m benchmarks.attention_kernels.sass --out FILE
    python -m benchmarks.attention_kernels.sass --compare BEFORE AFTER

The first command compiles kernels for Hopper (sm_90a), as `other_gpus` does, for calls of every
family, in five minutes of CPU time and two processes. The command prints and writes a line for each
program, with a digest of its SASS, encodings included. Functions are numbered in the SASS, because
their names may include the path of a module. The second command lists the differences between two
such files, and exits with 1 if there are any. A change that only moves kernels should cause no
differences.
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.runtime.driver import driver

# If kernels move, change only these imports.
from attention_kernels.decode.contiguous_decode import contiguous_decode as decode
from attention_kernels.decode.paged_batch import paged_batch
from attention_kernels.decode.paged_decode import paged_decode
from attention_kernels.decode.quantised_decode import quantised_decode
from attention_kernels.hopper.hopper_backward import hopper_backward
from attention_kernels.hopper.hopper_prefill import hopper_prefill
from attention_kernels.options import AttentionOptions, Lengths
from attention_kernels.portable.backward import backward
from attention_kernels.portable.masked_prefill import masked_prefill
from attention_kernels.portable.prefill import prefill
from attention_kernels.portable.varlen import KeyRanges, key_ranges, packed_prefill, padded_prefill
from attention_kernels.quantised.quantised_prefill import quantised_prefill
from attention_kernels.sparse.block_choice import choose_blocks
from attention_kernels.sparse.block_policy import BlockPolicy
from attention_kernels.sparse.block_sparse import block_sizes, block_sparse_attention
from attention_kernels.sparse.sparse_decode import paged_sparse_decode, sparse_decode
from attention_kernels.sparse.token_choice import choose_paged_tokens, choose_tokens
from attention_kernels.tiles.visited_blocks import empty_lists
from benchmarks import results
from benchmarks.attention_kernels.other_gpus import as_if_on

ENVIRONMENT = {"TRITON_DISABLE_LINE_INFO": "1", "TRITON_INTERPRET": "0"}
"""Environment variables of the compiling processes, set before they import Triton."""
COLUMNS = ("name", "kernel", "sha256", "instructions", "registers", "spills", "triton")
"""Columns of a file; spills are instructions that load from local memory or store there."""
COMPARED = COLUMNS[2:]
INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@\S+\s+)?([A-Z][\w.]*)", re.MULTILINE)
"""Pattern of a SASS line with an address; its group is the operation."""

Cases = Iterator[tuple[str, Callable[[], object]]]
"""Pairs of a name and a call that compiles one or more programs."""

HALF, BFLOAT, SINGLE = torch.float16, torch.bfloat16, torch.float32
INT8, FP8 = torch.int8, torch.float8_e4m3fn
MODES: dict[str, dict[str, Any]] = {
    "sage": {"score_dtype": INT8},
    "fp8": {"score_dtype": FP8, "fp8_value": True},
    "sage-fp8": {"score_dtype": INT8, "fp8_value": True},
}


def empty(*shape: int, dtype: torch.dtype = HALF) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def numbers(*shape: int) -> Tensor:
    return empty(*shape, dtype=torch.int32)


def bools(*shape: int) -> Tensor:
    return empty(*shape, dtype=torch.bool)


EXTRAS: dict[str, dict[str, Any]] = {
    "window+sinks": {"options": AttentionOptions(window=(255, 0)), "sinks": empty(8, dtype=SINGLE)},
    "soft cap": {"options": AttentionOptions(softcap=50.0), "is_causal": True},
    "all": {
        "options": AttentionOptions(bottom_right=True, window=(255, 7), softcap=50.0),
        "sinks": empty(8, dtype=SINGLE),
    },
}


def with_extras(name: str, attend: Callable[..., object], *operands: Any) -> Cases:
    for extra, options in EXTRAS.items():
        yield f"{name} {extra}", partial(attend, *operands, **options)


def operands(
    head_dim: int,
    q_len: int = 1024,
    kv_len: int = 1024,
    *,
    v_dim: int | None = None,
    heads: tuple[int, int] = (8, 2),
    batch: int = 1,
    dtype: torch.dtype = HALF,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return query, key and value as BHSD tensors without memory."""
    return (
        empty(batch, heads[0], q_len, head_dim, dtype=dtype),
        empty(batch, heads[1], kv_len, head_dim, dtype=dtype),
        empty(batch, heads[1], kv_len, v_dim or head_dim, dtype=dtype),
    )


def many_keys(head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return decode operands with enough keys to be read through tensor descriptors."""
    return operands(head_dim, 1, 32768, heads=(32, 8), batch=8)


def in_a_row(head_dim: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, int]:
    """Return three packed sequences, their offsets, and the maximum query length."""
    query, key, value = (empty(4096, heads, head_dim) for heads in (8, 2, 2))
    return query, key, value, numbers(4), numbers(4), 2048


def in_pages(
    head_dim: int, size: int, tokens: int, *, latent: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return pages of keys and values of four sequences, the page table and the lengths. With
    `latent`, there is one head, whose values are the first part of its keys."""
    each = tokens // size
    key = empty(4 * each, size, 1 if latent else 2, head_dim)
    return key, key[..., :latent] if latent else empty(*key.shape), numbers(4, each), numbers(4)


def of_prefill() -> Cases:
    for dim in (64, 96, 128, 256):
        for is_causal in (False, True):
            name = f"prefill {dim}{' causal' * is_causal}"
            yield name, partial(prefill, *operands(dim), is_causal=is_causal)
    yield "prefill bool mask 64", partial(prefill, *operands(64), bools(1024, 1024))
    yield "prefill float mask 128", partial(prefill, *operands(128), empty(1024, 1024))
    unaligned = bools(1024, 1025)[:, :1024]
    yield "prefill unaligned mask 128", partial(prefill, *operands(128), unaligned)
    yield "prefill mask of keys 128", partial(prefill, *operands(128), bools(1, 1024))
    yield from with_extras("prefill 128", prefill, *operands(128, 512))
    yield "prefill log-sum-exp 128", partial(prefill, *operands(128), return_lse=True)
    yield "prefill bfloat16 128", partial(prefill, *operands(128, dtype=BFLOAT))
    yield "prefill float32 64", partial(prefill, *operands(64, dtype=SINGLE))
    yield "prefill 192/128 causal", partial(prefill, *operands(192, v_dim=128), None, True)
    yield "prefill small 64", partial(prefill, *operands(64, 128, 256))
    yield "prefill unaligned 50", partial(prefill, *operands(50))


def of_lengths() -> Cases:
    """Yield padded and packed batches, and masks whose contents the kernels inspect."""
    ranges = KeyRanges(numbers(2), numbers(2))
    yield "padded 64", partial(padded_prefill, *operands(64, batch=2), ranges)
    yield (
        "padded all 128",
        partial(padded_prefill, *operands(128, batch=2), ranges, **EXTRAS["all"]),
    )
    yield (
        "packed 128 causal",
        partial(packed_prefill, *in_a_row(128), True, options=AttentionOptions(True)),
    )
    yield (
        "packed used keys 256 causal",
        partial(packed_prefill, *in_a_row(256), True, seqused_k=numbers(3)),
    )
    yield "packed all 64", partial(packed_prefill, *in_a_row(64), **EXTRAS["all"])
    yield "visits bool 64", partial(masked_prefill, *operands(64), bools(8, 1024, 1024))
    yield "visits float 128", partial(masked_prefill, *operands(128), empty(1024, 1024))
    for dim in (64, 128, 256):
        tensors = operands(dim, 9216, 9216)
        rows, keys = block_sizes(*tensors)
        visited = empty_lists((1, 8, -(-9216 // rows), -(-9216 // keys)), tensors[0].device)
        yield f"visits chosen {dim}", partial(block_sparse_attention, *tensors, visited)
    chosen = partial(block_sparse_attention, *tensors, visited)
    yield "visits chosen 256 causal", partial(chosen, is_causal=True)


def gradients(head_dim: int, mask: Tensor | None = None, **options: Any) -> None:
    """Compile the backward pass of a call."""
    dtype, is_packed = options.pop("dtype", BFLOAT), options.pop("is_packed", False)
    batch = 1 if is_packed else 2
    query, key, value = operands(head_dim, batch=batch, dtype=dtype)
    lengths = Lengths("packed", 3, 512, numbers(4), numbers(4)) if is_packed else None
    lse = empty(*query.shape[:3], dtype=SINGLE)
    backward(query, query, key, value, mask, query, lse, lengths=lengths, **options)


def of_gradients() -> Cases:
    for dim in (64, 96, 128, 256):
        yield f"gradients {dim}", partial(gradients, dim)
        yield f"gradients causal {dim}", partial(gradients, dim, is_causal=True)
        yield f"gradients bool mask {dim}", partial(gradients, dim, bools(1024, 1024))
        yield f"gradients float mask {dim}", partial(gradients, dim, empty(1024, 1024))
        yield f"gradients all {dim}", partial(gradients, dim, **EXTRAS["all"])
        scanned = partial(gradients, dim, bools(1024, 1024), is_scanned=True)
        yield f"gradients scanned mask {dim}", scanned
        yield f"gradients packed {dim}", partial(gradients, dim, is_causal=True, is_packed=True)
    yield "gradients float32 64", partial(gradients, 64, is_causal=True, dtype=SINGLE)
    yield "gradients float32 128", partial(gradients, 128, is_causal=True, dtype=SINGLE)


def of_hopper_gradients() -> Cases:
    window = AttentionOptions(True, (200, None))
    for dim, v_dim in ((64, 64), (128, 128), (256, 256), (192, 128)):
        query, key, value = operands(dim, v_dim=v_dim, dtype=BFLOAT, batch=2)
        output, lse = query[..., :v_dim], empty(*query.shape[:3], dtype=SINGLE)
        tensors = output, query, key, value, output, lse
        yield f"gradients {dim}", partial(hopper_backward, *tensors)
        yield f"gradients causal {dim}", partial(hopper_backward, *tensors, True)
        yield f"gradients window {dim}", partial(hopper_backward, *tensors, True, options=window)
        if dim > 128:
            continue
        cap = AttentionOptions(softcap=50.0)
        yield f"gradients soft cap {dim}", partial(hopper_backward, *tensors, True, options=cap)
        lengths = Lengths("packed", 3, 512, numbers(4), numbers(4), numbers(3))
        query, key, value = operands(dim, dtype=BFLOAT)
        lse = empty(*query.shape[:3], dtype=SINGLE)
        packed = partial(hopper_backward, query, query, key, value, query, lse, lengths=lengths)
        yield f"gradients packed {dim}", packed
        bottom = AttentionOptions(True)
        yield f"gradients packed causal {dim}", partial(packed, is_causal=True, options=bottom)
    query, key, value = operands(96, dtype=BFLOAT, batch=2)
    tensors = query, query, key, value, query, empty(*query.shape[:3], dtype=SINGLE)
    yield "gradients causal 96", partial(hopper_backward, *tensors, True)


def of_quantised_prefill() -> Cases:
    for mode, options in MODES.items():
        yield f"{mode} 128", partial(quantised_prefill, *operands(128), **options)
    sage, fp8 = (partial(quantised_prefill, **MODES[mode]) for mode in ("sage", "fp8"))
    yield "sage 64 causal", partial(sage, *operands(64), True)
    yield "fp8 mask 128", partial(fp8, *operands(128), attn_mask=bools(1024, 1024))
    yield "fp8 in tensor cores 128", partial(fp8, *operands(128), in_tensor_cores=True)
    yield "sage unsmoothed 64", partial(sage, *operands(64, dtype=BFLOAT), smooth_k=False)
    yield "fp8 all 96", partial(fp8, *operands(96, 512), **EXTRAS["all"])
    lengths = Lengths("padded", 2, 1024, k_lengths=numbers(2))
    yield "sage padded 128", partial(sage, *operands(128, batch=2), lengths=lengths)
    lengths = Lengths("packed", 3, 2048, numbers(4), numbers(4))
    yield "fp8 packed 64 causal", partial(fp8, *operands(64, 4096, 4096), True, lengths=lengths)


def of_hopper() -> Cases:
    """Yield calls of `hopper_prefill`, and schedules of quantised prefill on Hopper."""
    for dim in (64, 96, 128, 256):
        for is_causal in (False, True):
            name = f"hopper {dim}{' causal' * is_causal}"
            yield name, partial(hopper_prefill, *operands(dim), is_causal=is_causal)
    wide = operands(192, v_dim=128)
    yield "hopper 192/128 causal", partial(hopper_prefill, *wide, is_causal=True)
    yield "hopper bfloat16 128", partial(hopper_prefill, *operands(128, dtype=BFLOAT))
    yield "hopper log-sum-exp 128", partial(hopper_prefill, *operands(128), return_lse=True)
    invariant = AttentionOptions(True, invariant=True)
    for dim in (64, 128, 256):
        for keys in (1024, 1030):  # aligned queries, and others
            chunk = partial(hopper_prefill, *operands(dim, 512, keys), is_causal=True)
            yield f"hopper invariant {dim} of {keys}", partial(chunk, options=invariant)
    for dim in (64, 128):
        yield f"hopper bool mask {dim}", partial(hopper_prefill, *operands(dim), bools(1024, 1024))
    yield "hopper float mask 128", partial(hopper_prefill, *operands(128), empty(1024, 1024))
    yield from with_extras("hopper 64", hopper_prefill, *operands(64, 512))
    yield "hopper all 128", partial(hopper_prefill, *operands(128, 512), **EXTRAS["all"])
    schedules = {
        "of 4 heads 64": operands(64, heads=(64, 16), batch=8),
        "stream-k 64": operands(64, 4250, 4250, heads=(24, 24)),
        "stream-k 128": operands(128, 4096, 4096, heads=(10, 10)),
    }
    for name, tensors in schedules.items():
        yield f"hopper {name}", partial(hopper_prefill, *tensors)
        yield f"fp8 {name}", partial(quantised_prefill, *tensors, **MODES["fp8"])


def of_decode() -> Cases:
    for dim in (64, 128, 256):
        yield f"decode {dim}", partial(decode, *operands(dim, 1, 4096))
    for dim in (128, 256):
        yield f"decode long {dim}", partial(decode, *many_keys(dim))
    yield "decode lengths 128", partial(decode, *many_keys(128), seqused_k=numbers(8))
    yield "decode mask 128", partial(decode, *operands(128, 1, 4096), bools(1, 4096))
    yield "decode float mask 64", partial(decode, *operands(64, 4, 4096), empty(4, 4096))
    invariant = AttentionOptions(invariant=True)
    yield "decode invariant 128", partial(decode, *operands(128, 1, 4096), options=invariant)
    yield from with_extras("decode 128", decode, *operands(128, 4, 4096))
    query, key, _ = operands(576, 1, 8192, batch=16, heads=(16, 1))
    yield "decode latent", partial(decode, query, key, key[..., :512])
    for size, tokens in ((16, 4096), (64, 131072), (128, 131072)):
        cache = in_pages(128, size, tokens)
        yield f"paged decode of {size} 128", partial(paged_decode, empty(4, 8, 1, 128), *cache)
    query, cache = empty(4, 8, 2, 64), in_pages(64, 16, 4096)
    yield "paged decode all 64", partial(paged_decode, query, *cache, **EXTRAS["all"])
    cache = in_pages(576, 64, 65536, latent=512)
    yield "paged decode latent", partial(paged_decode, empty(4, 16, 1, 576), *cache)


def of_quantised_decode() -> Cases:
    int8, fp8 = (partial(quantised_decode, dtype=dtype) for dtype in (INT8, FP8))
    for dim in (64, 128, 256):
        yield f"decode int8 {dim}", partial(int8, *operands(dim, 1, 4096))
    yield "decode fp8 128", partial(fp8, *operands(128, 1, 4096))
    yield "decode fp8 lengths 128", partial(fp8, *many_keys(128), seqused_k=numbers(8))
    yield "paged decode int8 128", partial(int8, *many_keys(128), in_pages=True)
    yield "paged decode fp8 64", partial(fp8, *many_keys(64), in_pages=True)
    yield "decode int8 all 128", partial(int8, *operands(128, 2, 4096), **EXTRAS["all"])


def of_batches() -> Cases:
    """Yield an engine's batches over pages, in 16 bits and in FP8."""
    for size, dtype in ((16, BFLOAT), (64, BFLOAT), (16, FP8), (64, FP8)):
        key = empty(4 * 131072 // size, size, 2, 128, dtype=dtype)
        cache = key, key, numbers(4, 131072 // size), numbers(4)
        names = ("key_scale", "value_scale") if dtype == FP8 else ()
        scales = dict.fromkeys(names, empty(1, dtype=SINGLE))
        query, options = empty(4096, 8, 128, dtype=BFLOAT), AttentionOptions(True)
        batch = partial(paged_batch, query, *cache, numbers(5), 2048, True, options=options)
        yield f"batch in pages of {size} {dtype}", partial(batch, **scales)


def of_choice() -> Cases:
    """Yield cases of sparse decode, of selecting tokens and blocks, and of finding lengths."""
    query, key, value = operands(128, 1, 4096)
    yield "sparse decode 128", partial(sparse_decode, query, key, value, numbers(1, 2, 82))
    yield "choice 128", partial(choose_tokens, query, key, 0.02)
    query, key, value = operands(64, 1, 4096)
    wide = empty(1, 2, 82, dtype=torch.int64)
    yield "sparse decode 64", partial(sparse_decode, query, key, value, wide)
    yield "choice of some 64", partial(choose_tokens, query, key, 0.02, allowed=bools(1, 4096))
    query, cache = empty(4, 8, 1, 128), in_pages(128, 16, 4096)
    yield "paged sparse decode", partial(paged_sparse_decode, query, *cache, numbers(4, 2, 82))
    key, _, table, lengths = cache
    yield "paged choice", partial(choose_paged_tokens, query, key, table, lengths, 0.02)
    tensors = operands(128, 9216, 9216)
    yield "choice of blocks 128", partial(choose_blocks, *tensors, BlockPolicy(keep=0.5))
    mass = BlockPolicy(mass=0.9)
    yield "choice of mass 128 causal", partial(choose_blocks, *tensors, mass, is_causal=True)
    for dim in (64, 128):
        tensors = operands(dim, 9216, 9216)
        rows, keys = block_sizes(*tensors)
        visited = empty_lists((1, 8, -(-9216 // rows), -(-9216 // keys)), tensors[0].device)
        skipping = partial(block_sparse_attention, *tensors, visited, skip=0.01)
        yield f"skips {dim}", skipping
        yield f"skips {dim} causal, map", partial(skipping, is_causal=True, return_map=True)
    yield "key ranges", partial(key_ranges, bools(2, 1024))


GROUPS: dict[str, tuple[Callable[[], Cases], ...]] = {
    "portable": (
        *(of_prefill, of_lengths, of_quantised_prefill, of_quantised_decode, of_choice),
        *(of_batches, of_gradients),
    ),
    "hopper": (of_hopper, of_hopper_gradients, of_lengths, of_quantised_prefill, of_decode),
}
"""Cases of each process: with the kernels of any GPU, and with the kernels of a Hopper GPU.
A program that a group has already compiled is not compiled again."""


def compile_group(group: str) -> list[dict[str, Any]]:
    """Compile a group's cases, in a separate process because kernels cache what they compiled.

    Raises:
        ValueError: a case compiles nothing new.
    """
    lines: list[dict[str, Any]] = []
    programs: list[tuple[str, bytes]] = []

    def load(name: str, program: bytes, *rest: Any) -> tuple[None, None, int, int, int]:
        programs.append((name, program))
        return None, None, 0, 0, 1024

    # No Gluon kernel supports 9.1. All tensors have the same address, so that a value can be part
    # of its key.
    capability = (9, 0) if group == "hopper" else (9, 1)
    with (
        torch.no_grad(),
        as_if_on("9.0"),
        mock.patch("torch.cuda.get_device_capability", return_value=capability),
        mock.patch("torch.Tensor.data_ptr", return_value=256),
    ):
        driver.active.utils.load_binary = load
        for case, call in (each for family in GROUPS[group] for each in family()):
            programs.clear()
            call()
            if not programs:
                raise ValueError(f"{group} {case}: compiles nothing new")
            for number, (kernel, program) in enumerate(programs, 1):
                line = {"name": f"{group}: {case} ({number})", "kernel": kernel}
                lines.append({**line, **machine_code(program), "triton": triton.__version__})
    return lines


def machine_code(program: bytes) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(program)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-sass", "-res-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    resources, _, code = text.partition("\tcode for ")
    for number, function in enumerate(re.findall(r"Function : (\S+)", code)):
        code = code.replace(function, f"function {number}")
    instructions = INSTRUCTION.findall(code)
    return {
        "sha256": hashlib.sha256(code.encode()).hexdigest(),
        "instructions": len(instructions),
        "registers": max(map(int, re.findall(r"REG:(\d+)", resources))),
        "spills": sum(each.startswith(("LDL", "STL")) for each in instructions),
    }


def differences(before: Path, after: Path) -> tuple[list[str], int]:
    """Return the programs that are in one file only or differ between the files, and the number of
    all programs."""
    old, new = ({row["name"]: row for row in results.read(path)} for path in (before, after))
    found = []
    for name in old | new:
        if name not in old or name not in new:
            found.append(f"{name}: only in {before if name in old else after}")
            continue
        pairs = [(each, old[name][each], new[name][each]) for each in COMPARED]
        changes = [f"{each} {was:.12} → {now:.12}" for each, was, now in pairs if was != now]
        if changes:
            found.append(f"{name}: {', '.join(changes)}")
    return found, len(old | new)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    doing = parser.add_mutually_exclusive_group(required=True)
    doing.add_argument("--out", type=Path, help="file to write after compiling")
    doing.add_argument("--compare", type=Path, nargs=2, metavar=("BEFORE", "AFTER"))
    arguments = parser.parse_args()
    if arguments.compare:
        found, count = differences(*arguments.compare)
        print(*found, f"{len(found)} of {count} programs differ", sep="\n")
        sys.exit(bool(found) or not count)
    spawned = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as cache:
        os.environ.update(ENVIRONMENT, TRITON_CACHE_DIR=cache)
        with spawned.Pool(2, maxtasksperchild=1) as pool:
            # Not `map`, which would treat a StopIteration in a case as the end of the cases.
            compiling = [pool.apply_async(compile_group, [group]) for group in GROUPS]
            lines = [line for each in compiling for line in each.get()]
    for line in lines:
        print(*(line[column] for column in COLUMNS[:-1]), sep="\t")
    results.write_lines(lines, COLUMNS, arguments.out)


if __name__ == "__main__":
    main()
