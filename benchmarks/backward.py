"""Checks and times the backward pass of `attention` beside SDPA's backends (needs a GPU).

    python -m benchmarks.backward [--out FILE]

First compares gradients of small calls with the formula in float64. An error is given in units of
the error of the formula in the tensors' own type, once for the whole gradient; more than 2 fails.
Gradients must also have the same bits in three runs, except those of the query in `attention`.
`portable` is `attention` with `deterministic`, which never runs the Hopper backward.

Then times the backward pass alone, of 16,384 tokens with 16 heads, for both, for cuDNN's and
FlashAttention 2's backward in SDPA, and for FlashAttention 3 and 4 if they are installed. They take
turns in rounds of a few calls each; a ratio is the median over the rounds of a kernel's time / the
time of `attention`. TFLOPS count 2.5 times the forward's operations. Takes less than two minutes.
Writes the lines to FILE, such as `benchmarks/results/backward.csv`.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import attention_kernels as ak
from benchmarks import results
from benchmarks.gpu import gpu
from tests.attention_kernels.gradients import Formula, gradients

COLUMNS = (
    *("kind", "kernel", "head_dim", "is_causal", "length", "case", "time_ms", "tflops", "ratio"),
    *("error_query", "error_key", "error_value"),
    *("machine.device", "machine.torch", "machine.triton"),
)
OURS = {"attention": False, "portable": True}
"""Kernels of ours, and `deterministic` of their options."""
BACKENDS = {
    "torch-cudnn": SDPBackend.CUDNN_ATTENTION,
    "torch-flash": SDPBackend.FLASH_ATTENTION,
}
LIBRARIES = {"fa3": "flash_attn_interface", "fa4": "flash_attn.cute"}
"""Modules with a `flash_attn_func`, for tensors (B, S, H, D)."""
TOKENS, HEADS = 16384, 16
LENGTHS = (1024, 2048, 4096, 8192)
ROUNDS, TOGETHER = 12, 4
LARGEST_ERROR = 2.0

Sizes = tuple[int, int, int, int, int, int, int]
"""Batch, query heads, key heads, queries, keys, and head dimensions of key and value."""
BOTTOM = ak.AttentionOptions(bottom_right=True)


def cases(device: torch.device) -> Iterator[tuple[str, torch.dtype, Sizes, dict[str, Any]]]:
    """Yield 20 calls: name, type, sizes and arguments of `attention`."""
    half, bfloat = torch.float16, torch.bfloat16
    for dim in (64, 128):
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


def check(device: torch.device, kernel: str) -> list[dict[str, Any]]:
    """Print and return the errors of the gradients of the `cases` by a kernel of ours."""
    lines: list[dict[str, Any]] = []
    print(
        f"\n{kernel}\n\n"
        "| case | dtype | error of dq | dk | dv | same bits | |\n|---|---|---:|---:|---:|---|---|"
    )
    for name, dtype, sizes, options in cases(device):
        batch, heads, kv_heads, q_len, k_len, dim, v_dim = sizes
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
def installed() -> dict[str, Callable[..., Any]]:
    """Return the functions of `LIBRARIES` by kernel, and print which are absent."""
    found = {}
    for name, module in LIBRARIES.items():
        try:
            found[name] = importlib.import_module(module).flash_attn_func
        except ImportError as error:
            print(f"{name} is not installed: {error}")
    return found


def backwards(
    length: int, head_dim: int, is_causal: bool, device: torch.device
) -> dict[str, Callable[[], object]]:
    """Return functions that run the backward pass alone, by kernel; a rival that is absent or
    refuses the call has none."""
    shape = TOKENS // length, HEADS, length, head_dim
    query, key, value, above = (
        torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(4)
    )
    leaves = query, key, value
    for leaf in leaves:
        leaf.requires_grad_()

    def of(output: Tensor) -> Callable[[], object]:
        return lambda: torch.autograd.grad(output, leaves, above, retain_graph=True)

    found = {}
    for name, deterministic in OURS.items():
        options = ak.AttentionOptions(deterministic=deterministic)
        found[name] = of(ak.attention(*leaves, is_causal=is_causal, options=options))
    for name, backend in BACKENDS.items():
        try:
            with sdpa_kernel(backend):
                output = scaled_dot_product_attention(query, key, value, is_causal=is_causal)
            found[name] = of(output)
        except RuntimeError as error:
            print(f"{name}: {str(error).splitlines()[0]}")
    for name, function in installed().items():
        output = function(*(each.transpose(1, 2) for each in leaves), causal=is_causal)
        output = output[0] if isinstance(output, tuple) else output
        found[name] = of(output.transpose(1, 2))
    for run in found.values():
        run()
    return found


def milliseconds(run: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(TOGETHER):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / TOGETHER


def time_group(head_dim: int, is_causal: bool, device: torch.device) -> list[dict[str, Any]]:
    """Print and return the times of one head dimension, full or causal."""
    kernels = (*OURS, *BACKENDS, *installed())
    print(f"\nhead_dim {head_dim}, {'causal' if is_causal else 'full'}: TFLOPS (ratio to ours)\n")
    print(f"| length | {' | '.join(kernels)} |\n|---:|{'---:|' * len(kernels)}")
    lines: list[dict[str, Any]] = []
    for length in LENGTHS:
        runs = backwards(length, head_dim, is_causal, device)
        rounds = [{name: milliseconds(run) for name, run in runs.items()} for _ in range(ROUNDS)]
        operations = 2.5 * 4 * TOKENS * length * HEADS * head_dim / (2 if is_causal else 1)
        cells = []
        for name in kernels:
            if name not in runs:
                cells.append("")
                continue
            time = statistics.median(each[name] for each in rounds)
            ratio = statistics.median(each[name] / each["attention"] for each in rounds)
            tflops = operations / time / 1e9
            cells.append(f"{tflops:.0f}" + ("" if name == "attention" else f" ({ratio:.2f})"))
            line = {"kind": "time", "kernel": name, "head_dim": head_dim, "is_causal": is_causal}
            lines.append(
                {**line, "length": length, "time_ms": time, "tflops": tflops, "ratio": ratio}
            )
        print(f"| {length} | {' | '.join(cells)} |", flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, help="CSV file to write (default: none)")
    arguments = parser.parse_args()
    device = gpu()
    torch.manual_seed(0)
    lines = [line for kernel in OURS for line in check(device, kernel)]
    for head_dim in (128, 64):
        for is_causal in (False, True):
            lines += time_group(head_dim, is_causal, device)
    if arguments.out:
        import triton

        machine = {
            "machine.device": torch.cuda.get_device_name(device),
            "machine.torch": torch.__version__,
            "machine.triton": triton.__version__,
        }
        results.write_lines(({**line, **machine} for line in lines), COLUMNS, arguments.out)


if __name__ == "__main__":
    main()
