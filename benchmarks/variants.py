"""Compares kernels on features beyond SDPA, on random values (needs a GPU).

    python -m benchmarks.variants [--env NAME=PYTHON] [--out FILE]

Times a window of 1,024 keys and the same call without a window, at 8k and 32k keys and in decode;
soft caps; sinks as in gpt-oss; queries that follow cached keys; and packed sequences. Writes
`benchmarks/results/variants.csv` and prints its table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.gpu import gpu
from benchmarks.sweep import Sweeps, parser, sweep_all
from benchmarks.tables.speed import by_call
from capture.call.attention_variant import AttentionVariant
from replay.workloads.random_calls import Spec

LONG_WINDOW = {"variant": AttentionVariant(bottom_right=True, window=(4095, None))}
"""Window of Mistral and Gemma 2."""
WINDOW = {"variant": AttentionVariant(bottom_right=True, window=(1023, None))}
SHORT_WINDOW = {"variant": AttentionVariant(bottom_right=True, window=(127, None))}
SOFT_CAP = {"variant": AttentionVariant(softcap=50.0)}
BOTTOM_RIGHT = {"is_causal": True, "variant": AttentionVariant(bottom_right=True)}
LENGTHS = (2048, 1300, 700, 2000, 77, 1900, 160, 7)

LLAMA_8K = Spec(1, 32, 8, 8192, 8192, 128, 128, is_causal=True)
LLAMA_32K = Spec(1, 32, 8, 32768, 32768, 128, 128, is_causal=True)
GPT_OSS = Spec(1, 64, 8, 8192, 8192, 64, 64, is_causal=True)
GEMMA = Spec(1, 16, 8, 8192, 8192, 256, 256, is_causal=True)
BEHIND_CACHE = Spec(1, 32, 8, 1024, 16384, 128, 128)
DECODE = Spec(8, 32, 8, 1, 32768, 128, 128)
DECODE_GPT_OSS = Spec(8, 64, 8, 1, 32768, 64, 64)
PACKED = Spec(1, 32, 8, sum(LENGTHS), sum(LENGTHS), 128, 128, is_causal=True)

OURS = "triton-fa2,triton-fa3,triton-fp8,triton-sage-fp8"
LIBRARIES = "fa2,fa3,fa4,flashinfer-fa2,flashinfer-fa3,flex,torch-masked"


def sinks(heads: int) -> dict[str, Any]:
    """Return a fixed logit per head."""
    generator = torch.Generator().manual_seed(1)
    return {"sinks": torch.randn(heads, generator=generator).to(torch.bfloat16)}


def packed(lengths: Sequence[int]) -> dict[str, Any]:
    """Return the offsets at which sequences of these lengths begin and end."""
    offsets = torch.tensor((0, *lengths)).cumsum(0).int()
    longest = max(lengths)
    variant = AttentionVariant(bottom_right=True, max_seqlen_q=longest, max_seqlen_k=longest)
    return {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "variant": variant}


SWEEPS: Sweeps = {
    f"torch-default,{OURS},{LIBRARIES},eager": {
        "8k": (LLAMA_8K, {}),
        "8k-window-1024": (LLAMA_8K, WINDOW),
        "8k-soft-cap": (LLAMA_8K, SOFT_CAP),
        "8k-gpt-oss": (GPT_OSS, {}),
        "8k-gpt-oss-sinks": (GPT_OSS, sinks(64)),
        "8k-gpt-oss-window-1024": (GPT_OSS, WINDOW),
        "8k-gpt-oss-sinks-window-128": (GPT_OSS, {**sinks(64), **SHORT_WINDOW}),
    },
    f"torch-default,{OURS},{LIBRARIES}": {
        "8k-gemma": (GEMMA, {}),
        "8k-gemma-soft-cap": (GEMMA, SOFT_CAP),
        "1k-of-16k": (BEHIND_CACHE, {}),
        "1k-of-16k-bottom-right": (BEHIND_CACHE, BOTTOM_RIGHT),
        "32k": (LLAMA_32K, {}),
        "32k-window-1024": (LLAMA_32K, WINDOW),
    },
    "torch-default,triton-decode,fa2-kvcache,flashinfer-decode,flex,torch-masked": {
        "decode": (DECODE, {}),
        "decode-window-1024": (DECODE, WINDOW),
        "decode-gpt-oss-sinks": (DECODE_GPT_OSS, sinks(64)),
        "decode-gpt-oss-sinks-window-128": (DECODE_GPT_OSS, {**sinks(64), **SHORT_WINDOW}),
    },
    f"{OURS},triton-varlen,torch-varlen,fa2-varlen,fa3-varlen,fa4-varlen,flashinfer-fa2,"
    "flashinfer-fa3,flex,torch-masked": {
        "one-sequence": (PACKED, {}),
        "packed": (PACKED, packed(LENGTHS)),
        "packed-window-128": (
            PACKED,
            {**packed(LENGTHS), "variant": AttentionVariant(True, (127, None), None, 2048, 2048)},
        ),
    },
}
"""Calls by name, grouped by the kernels that are timed on them."""


def main() -> None:
    arguments = parser(__doc__, "", "variants.csv", seconds=0.5).parse_args()
    gpu()
    sweep_all(SWEEPS, arguments)
    print(by_call(arguments.out))


if __name__ == "__main__":
    main()
