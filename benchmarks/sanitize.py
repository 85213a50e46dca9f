"""Runs our Triton kernels once on small odd shapes, under a memory checker.

    compute-sanitizer --tool memcheck --error-exitcode 1 python -m benchmarks.sanitize
    compute-sanitizer ... python -m benchmarks.sanitize --kernel 'triton-fa*'

Prints one line per kernel. Every tensor is a separate allocation: within a block of PyTorch's
caching allocator, a read out of bounds would hit a neighbouring tensor unnoticed. Exits 1 if an
output is not finite, if a kernel supports none of the shapes, or if no kernel can run.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import sys
from collections.abc import Iterator
from dataclasses import replace

# PyTorch reads this variable when it first allocates.
os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"

import torch

from capture.call.attention_call import AttentionCall
from capture.call.attention_variant import AttentionVariant
from replay.kernels.registry import Kernel, catalogue
from replay.workloads.random_calls import Spec

HEAD_DIMS = (40, 72, 128)
LENGTHS = ((1, 1), (1, 127), (7, 127), (127, 7), (127, 127))
"""Pairs of query length and key length."""


def calls(device: torch.device) -> Iterator[AttentionCall]:
    """Yield plain, causal and padded calls of every head_dim and length, then other features.

    Other features are windows with a soft cap and sinks, key lengths, packed sequences and pages.
    """
    generator = torch.Generator(device).manual_seed(0)
    for head_dim in HEAD_DIMS:
        for q_len, kv_len in LENGTHS:
            for is_causal in (False, True):
                spec = Spec(2, 4, 2, q_len, kv_len, head_dim, head_dim, is_causal)
                yield spec.call(device, generator)
            plain = Spec(2, 4, 2, q_len, kv_len, head_dim, head_dim).call(device, generator)
            lengths = torch.tensor([kv_len, (kv_len + 1) // 2], device=device)
            keys = torch.arange(kv_len, device=device) < lengths[:, None]
            yield plain.with_tensors({"attn_mask": keys[:, None, None]})
            yield replace(plain, seqused_k=lengths.int())
            yield replace(
                plain, variant=AttentionVariant(True, (5, 3), 20.0), sinks=keys.new_ones(4) * 0.5
            )
            yield packed(head_dim, q_len, kv_len, generator)
            yield in_pages(head_dim, q_len, kv_len, generator)
    # The key is long enough for decode to read it through tensor descriptors.
    yield Spec(1, 8, 8, 1, 4099, 128, 128).call(device, generator)


def packed(head_dim: int, q_len: int, kv_len: int, generator: torch.Generator) -> AttentionCall:
    """Make a call of three sequences; the second has one query and one key."""

    def starts(length: int) -> torch.Tensor:
        ends = [0, length, length + 1, 2 * length + 1]
        return torch.tensor(ends, device=generator.device, dtype=torch.int32)

    spec = Spec(1, 4, 2, 2 * q_len + 1, 2 * kv_len + 1, head_dim, head_dim)
    call = spec.call(generator.device, generator)
    variant = AttentionVariant(max_seqlen_q=q_len, max_seqlen_k=kv_len)
    return replace(call, cu_seqlens_q=starts(q_len), cu_seqlens_k=starts(kv_len), variant=variant)


def in_pages(head_dim: int, q_len: int, kv_len: int, generator: torch.Generator) -> AttentionCall:
    """Make a call of two sequences whose keys lie in pages of 16, in random order."""
    device, each = generator.device, -(-kv_len // 16)
    spec = Spec(2, 4, 2, q_len, kv_len, head_dim, head_dim)
    of_pages = replace(spec, batch=2 * each, kv_len=16).call(device, generator)
    pages = torch.randperm(2 * each, device=device, generator=generator).int()
    return replace(
        of_pages,
        query=spec.call(device, generator).query,
        page_table=pages.view(2, each),
        seqused_k=torch.tensor([kv_len, 1], device=device, dtype=torch.int32),
    )


def run(kernel: Kernel, device: torch.device) -> tuple[int, int]:
    """Return how many calls the kernel supports, and how many outputs were not finite."""
    taken = wrong = 0
    for call in calls(device):
        if kernel.refuses(call) is None:
            output = kernel.attention(**call.arguments())
            torch.cuda.synchronize(device)
            taken += 1
            wrong += not bool(output.isfinite().all())
    return taken, wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kernel", default="triton-*", metavar="NAME", help="name or glob")
    pattern = parser.parse_args().kernel
    kernels = [
        each
        for name, each in catalogue().items()
        if name == pattern or fnmatch.fnmatch(name, pattern)
    ]
    if not kernels:
        parser.error(f"no kernel matches {pattern}; see replay kernels")
    device = torch.device("cuda")
    failed, ran = False, False
    for kernel in kernels:
        if reason := kernel.unavailable(device):
            print(f"{kernel.name}: cannot run here: {reason}", flush=True)
            continue
        taken, wrong = run(kernel, device)
        ran = True
        failed = failed or wrong > 0 or taken == 0
        print(f"{kernel.name}: {taken} calls, {wrong} with non-finite outputs", flush=True)
    return int(failed or not ran)


if __name__ == "__main__":
    sys.exit(main())
