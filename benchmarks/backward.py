"""Checks and times the backward pass of `attention` beside SDPA's backends (needs a GPU).

    python -m benchmarks.backward [--head-dim 256 --head-dim 192/128] [--out FILE]

First compares gradients of small calls of these head dimensions (by default of all, also with masks
and in float32) with the formula in float64. An error is given in units of
the error of the formula in the tensors' own type, once for the whole gradient; more than 2 fails.
Gradients must also have the same bits in three runs, except those of the query in `attention`.
`portable` is `attention` with `deterministic`, which never runs the Hopper backward.

Then times the backward pass alone, of 16,384 tokens with 16 heads, for both, for cuDNN's and
FlashAttention 2's backward in SDPA, and for FlashAttention 3 and 4 if they are installed: batches,
and causal sequences of 82 to 8,192 tokens, packed, beside PyTorch's `varlen_attn`. Calls with a
soft cap have no rival in PyTorch. Kernels take turns in rounds of a few calls each; a ratio is the
median over the rounds of a kernel's time / the time of `attention`. TFLOPS count 2.5 times the
forward's operations. Takes some five minutes. Writes the lines to FILE, such as
`benchmarks/results/backward.csv`.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import attention_kernels as ak
from benchmarks import results
from benchmarks.gpu import MACHINE, gpu, measured_on
from tests.attention_kernels.gradients import Formula, gradients

COLUMNS = (
    *("kind", "kernel", "head_dim", "is_causal", "length", "case", "time_ms", "tflops", "ratio"),
    *("error_query", "error_key", "error_value"),
    *MACHINE,
)
OURS = {"attention": False, "portable": True}
"""Kernels of ours, and `deterministic` of their options."""
BACKENDS = {
    "torch-cudnn": SDPBackend.CUDNN_ATTENTION,
    "torch-flash": SDPBackend.FLASH_ATTENTION,
}
LIBRARIES = {"fa3": "flash_attn_interface", "fa4": "flash_attn.cute"}
"""Modules with a `flash_attn_func`, for tensors (B, S, H, D), and a `flash_attn_varlen_func`."""
REFUSALS = (AssertionError, NotImplementedError, RuntimeError, ValueError)
"""Errors with which libraries refuse a call, some of them only in the backward pass."""
TOKENS, HEADS = 16384, 16
LENGTHS = (1024, 2048, 4096, 8192)
WIDTHS = {
    "128": (128, 128), "64": (64, 64), "96": (96, 96), "256": (256, 256), "192/128": (192, 128)
}  # fmt: skip
"""Head dimensions of key and value by name."""
PACKED = (8192, 82, 4096, 2048, 130, 1024, 512, 300)
"""Tokens of each packed sequence."""
SOFTCAP = 30.0
ROUNDS, TOGETHER = 12, 4
LARGEST_ERROR = 2.0

Sizes = tuple[int, int, int, int, int, int, int]
"""Batch, query heads, key heads, queries, keys, and head dimensions of key and value."""
BOTTOM = ak.AttentionOptions(bottom_right=True)


def cases(device: torch.device) -> Iterator[tuple[str, torch.dtype, Sizes, dict[str, Any]]]:
    """Yield 25 calls: name, type, sizes and arguments of `attention`."""
    half, bfloat = torch.float16, torch.bfloat16
    for dim in (64, 128, 256):
        yield f"full {dim}", bfloat, (2, 4, 4, 512, 512, dim, dim), {}
        yield f"causal {dim}", bfloat, (2, 4, 2, 513, 513, dim, dim), {"is_causal": True}
        shape = 2, 4, 1, 300, 700, dim, dim
        yield f"bottom right {dim}", half, shape, {"is_causal": True, "options": BOTTOM}
        window = ak.AttentionOptions(True, (100, 20))
        yield f"window {dim}", half, (1, 4, 4, 700, 500, dim, dim), {"options": window}
        cap = ak.AttentionOptions(softcap=2.0)
        shape = 1, 8, 1, 400, 400, dim, dim
        yield f"soft cap {dim}", bfloat, shape, {"is_causal": True, "options": cap}
    mask = torch.rand(600, 800, device=device) > 0.3
    shape = 2, 4, 2, 600, 800, 64, 64
    yield "bool mask", half, shape, {"attn_mask": mask}
    yield "float mask", half, shape, {"attn_mask": torch.randn(4, 600, 800, device=device).half()}
    yield "mask of keys", half, shape, {"attn_mask": torch.rand(2, 1, 1, 800, device=device) > 0.3}
    position = torch.arange(1100, device=device)
    documents = position[:, None] // 200 == position // 200
    yield "scanned mask", bfloat, (1, 4, 4, 1100, 1100, 128, 128), {"attn_mask": documents}
    yield "decoded queries", bfloat, (2, 8, 2, 5, 1000, 128, 128), {}
    yield "more queries", half, (1, 2, 2, 500, 200, 128, 128), {"is_causal": True}
    yield "head_dim 96", bfloat, (1, 4, 4, 400, 400, 96, 96), {"is_causal": True}
    yield "head_dim 72", half, (1, 4, 4, 400, 400, 72, 72), {}
    yield "head_dim 192/128", bfloat, (1, 4, 4, 400, 400, 192, 128), {"is_causal": True}
    yield "float32", torch.float32, (1, 4, 2, 300, 300, 128, 128), {"is_causal": True}


def check(device: torch.device, kernel: str, widths: Sequence[str] | None) -> list[dict[str, Any]]:
    """Print and return the errors of the gradients of the `cases` by a kernel of ours.

    Args:
        widths: entries of `WIDTHS` whose cases are checked; None for all cases.
    """
    lines: list[dict[str, Any]] = []
    print(
        f"\n{kernel}\n\n"
        "| case | dtype | error of dq | dk | dv | same bits | |\n|---|---|---:|---:|---:|---|---|"
    )
    for name, dtype, sizes, options in cases(device):
        batch, heads, kv_heads, q_len, k_len, dim, v_dim = sizes
        if widths is not None and (dim, v_dim) not in [WIDTHS[width] for width in widths]:
            continue
        shapes = (heads, q_len, dim), (kv_heads, k_len, dim), (kv_heads, k_len, v_dim)
        tensors = [torch.randn(batch, *shape, device=device).to(dtype) for shape in shapes]
        above = torch.randn(batch, heads, q_len, v_dim, device=device).to(dtype)
        below = torch.randn(batch, heads, q_len, device=device)

        settings = replace(options.get("options", ak.PLAIN), deterministic=OURS[kernel])
        ours = functools.partial(ak.attention, enable_gqa=True, return_lse=True)
        ours = functools.partial(ours, **{**options, "options": settings})
        first, *others = (gradients(ours, tensors, above, below) for _ in range(3))
        formula = Formula(**options)
        rounded = gradients(formula, tensors, above, below)
        exact = gradients(formula, [each.double() for each in tensors], above, below)
        errors = [
            float((found - best).norm() / ((theirs - best).norm() + 1e-6 * best.norm()))
            for found, theirs, best in zip(first, rounded, exact, strict=True)
        ]
        same = [
            all(torch.equal(one, other) for other in rest)
            for one, *rest in zip(first, *others, strict=True)
        ]
        same_bits = all(same if OURS[kernel] else same[1:])
        verdict = "" if same_bits and max(errors) <= LARGEST_ERROR else "FAILED"
        shown = " | ".join(f"{error:.2f}" for error in errors)
        bits = "yes" if all(same) else "no"
        print(f"| {name} | {str(dtype)[6:]} | {shown} | {bits} | {verdict} |", flush=True)
        named = dict(zip(("error_query", "error_key", "error_value"), errors, strict=True))
        lines.append({"kind": "errors", "kernel": kernel, "case": name, **named})
    return lines


@functools.cache
def installed() -> dict[str, Any]:
    """Return the modules of `LIBRARIES` by kernel, and print which are absent."""
    found = {}
    for name, module in LIBRARIES.items():
        try:
            found[name] = importlib.import_module(module)
        except ImportError as error:
            print(f"{name} is not installed: {error}")
    return found


Runs = dict[str, Callable[[], object]]
"""Functions that run the backward pass alone, by kernel; a rival that is absent or refuses the call
has none."""


def backwards(
    length: int, width: str, is_causal: bool, softcap: float | None, device: torch.device
) -> Runs:
    """Return runs of a batch of sequences of one length."""
    dim, v_dim = WIDTHS[width]
    query, key, value, above = (
        torch.randn(TOKENS // length, HEADS, length, each, device=device, dtype=torch.bfloat16)
        for each in (dim, dim, v_dim, v_dim)
    )
    leaves = query, key, value
    for leaf in leaves:
        leaf.requires_grad_()

    def of(output: Tensor) -> Callable[[], object]:
        return lambda: torch.autograd.grad(output, leaves, above, retain_graph=True)

    found = {}
    for name, deterministic in OURS.items():
        options = ak.AttentionOptions(softcap=softcap, deterministic=deterministic)
        found[name] = of(ak.attention(*leaves, is_causal=is_causal, options=options))
    for name, backend in ({} if softcap else BACKENDS).items():
        try:
            with sdpa_kernel(backend):
                output = scaled_dot_product_attention(query, key, value, is_causal=is_causal)
            found[name] = of(output)
        except RuntimeError as error:
            print(f"{name}: {str(error).splitlines()[0]}")
    for name, module in installed().items():
        tensors = (each.transpose(1, 2) for each in leaves)
        try:
            output = module.flash_attn_func(*tensors, causal=is_causal, softcap=softcap or 0.0)
        except REFUSALS as error:
            print(f"{name}: {(str(error) or repr(error)).splitlines()[0]}")
            continue
        output = output[0] if isinstance(output, tuple) else output
        found[name] = of(output.transpose(1, 2))
    return found


def packed_backwards(head_dim: int, device: torch.device) -> Runs:
    """Return runs of the `PACKED` sequences, causal."""
    starts = torch.tensor((0, *PACKED), device=device).cumsum(0).int()
    query, key, value, above = (
        torch.randn(sum(PACKED), HEADS, head_dim, device=device, dtype=torch.bfloat16)
        for _ in range(4)
    )
    leaves = query, key, value
    for leaf in leaves:
        leaf.requires_grad_()
    given = *leaves, starts, starts, max(PACKED), max(PACKED)
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    named: dict[str, Any] = dict(zip(names, given[3:], strict=True))
    outputs = {
        name: ak.flash_attn_varlen_func(*leaves, **named, causal=True, deterministic=deterministic)
        for name, deterministic in OURS.items()
    }
    for name, module in installed().items():
        output = module.flash_attn_varlen_func(*leaves, **named, causal=True)
        outputs[name] = output[0] if isinstance(output, tuple) else output
    try:
        varlen = importlib.import_module("torch.nn.attention.varlen")
        outputs["torch-flash"] = varlen.varlen_attn(*given, window_size=(-1, 0))
    except (ImportError, TypeError, RuntimeError) as error:
        print(f"varlen_attn: {str(error).splitlines()[0]}")

    def of(output: Tensor) -> Callable[[], object]:
        return lambda: torch.autograd.grad(output, leaves, above, retain_graph=True)

    return {name: of(output) for name, output in outputs.items()}


def milliseconds(run: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(TOGETHER):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / TOGETHER


def time_runs(runs: Runs, operations: float, **named: Any) -> list[dict[str, Any]]:
    """Print a row of the table of a call's times, and return the lines of the kernels."""
    for name, run in list(runs.items()):
        try:
            run()
        except REFUSALS as error:
            if name in OURS:
                raise
            print(f"{name}: {(str(error) or repr(error)).splitlines()[0]}")
            del runs[name]
    rounds = [{name: milliseconds(run) for name, run in runs.items()} for _ in range(ROUNDS)]
    lines: list[dict[str, Any]] = []
    cells = []
    for name in (*OURS, *BACKENDS, *installed()):
        if name not in runs:
            cells.append("")
            continue
        time = statistics.median(each[name] for each in rounds)
        ratio = statistics.median(each[name] / each["attention"] for each in rounds)
        tflops = operations / time / 1e9
        cells.append(f"{tflops:.0f}" + ("" if name == "attention" else f" ({ratio:.2f})"))
        lines.append({**named, "kernel": name, "time_ms": time, "tflops": tflops, "ratio": ratio})
    print(f"| {named['length']} | {' | '.join(cells)} |", flush=True)
    return lines


def print_head(title: str) -> None:
    kernels = (*OURS, *BACKENDS, *installed())
    print(f"\n{title}: TFLOPS (ratio to ours)\n")
    print(f"| length | {' | '.join(kernels)} |\n|---:|{'---:|' * len(kernels)}")


def operations_of(pairs: int, width: str) -> float:
    """Return the operations of a backward pass over pairs of queries and keys."""
    return 2.5 * 2 * pairs * HEADS * sum(WIDTHS[width])


def time_group(
    width: str, is_causal: bool, device: torch.device, softcap: float | None = None
) -> list[dict[str, Any]]:
    """Print and return the times of one entry of `WIDTHS`, full or causal."""
    title = f"head_dim {width}, {'causal' if is_causal else 'full'}"
    print_head(title + (f", soft cap {softcap}" if softcap else ""))
    lines = []
    named = {"kind": "soft cap" if softcap else "time", "head_dim": width}
    for length in LENGTHS:
        runs = backwards(length, width, is_causal, softcap, device)
        operations = operations_of(TOKENS * length // (2 if is_causal else 1), width)
        lines += time_runs(runs, operations, **named, is_causal=is_causal, length=length)
    return lines


def time_packed(width: str, device: torch.device) -> list[dict[str, Any]]:
    """Print and return the times of packed sequences."""
    runs = packed_backwards(WIDTHS[width][0], device)
    print_head(f"head_dim {width}, causal, packed sequences of {min(PACKED)} to {max(PACKED)}")
    operations = operations_of(sum(each**2 for each in PACKED) // 2, width)
    named = {"kind": "packed", "head_dim": width, "is_causal": True, "length": sum(PACKED)}
    return time_runs(runs, operations, **named)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, help="CSV file to write (default: none)")
    parser.add_argument(
        "--head-dim",
        choices=WIDTHS,
        action="append",
        help="head dimension to check and time, repeatable (default: all)",
    )
    arguments = parser.parse_args()
    device = gpu()
    torch.manual_seed(0)
    lines = [line for kernel in OURS for line in check(device, kernel, arguments.head_dim)]
    for width in arguments.head_dim or WIDTHS:
        for is_causal in (False, True) if width != "96" else (True,):
            lines += time_group(width, is_causal, device)
        if width in ("64", "128"):
            lines += time_packed(width, device)
            lines += time_group(width, True, device, SOFTCAP)
    if arguments.out:
        machine = measured_on(device)
        results.write_lines(({**line, **machine} for line in lines), COLUMNS, arguments.out)


if __name__ == "__main__":
    main()
