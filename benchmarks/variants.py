"""Compares kernels on what calls ask beyond SDPA, on random values (needs a GPU).

    python -m benchmarks.variants [--env NAME=PYTHON] [--out FILE]

Times a window of 1,024 keys beside the same call without it, at 8k and 32k keys and when decoding,
soft caps, sinks as in gpt-oss, packed sequences, and masks of documents (an eighth of the keys that
causality leaves, in tensors of all). Writes `benchmarks/results/variants.csv` and
prints its table.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.sweep import cold, parser, sweep
from benchmarks.tables.speed import by_call
from capture.call import AttentionCall
from capture.storage.call_file import PackedCall
from capture.variant import Variant
from replay.workloads.random_calls import Spec
from replay.workloads.recorded import Workload, recorded_call

WINDOW = {"variant": Variant(bottom_right=True, window=(1023, None))}
SHORT_WINDOW = {"variant": Variant(bottom_right=True, window=(127, None))}
LENGTHS = (2048, 1300, 700, 2000, 77, 1900, 160, 7)

LLAMA_8K = Spec(1, 32, 8, 8192, 8192, 128, 128, is_causal=True)
LLAMA_32K = Spec(1, 32, 8, 32768, 32768, 128, 128, is_causal=True)
GPT_OSS = Spec(1, 64, 8, 8192, 8192, 64, 64, is_causal=True)
DECODE = Spec(8, 32, 8, 1, 32768, 128, 128)
DECODE_GPT_OSS = Spec(8, 64, 8, 1, 32768, 64, 64)
PACKED = Spec(1, 32, 8, sum(LENGTHS), sum(LENGTHS), 128, 128, is_causal=True)

LIBRARIES = "fa2,fa3,fa4,flashinfer-fa2,flashinfer-fa3,flex,torch-masked"


def _sinks(heads: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    return {"sinks": torch.randn(heads, generator=generator).to(torch.bfloat16)}


def _packed() -> dict[str, Any]:
    offsets = torch.tensor((0, *LENGTHS)).cumsum(0).int()
    longest = max(LENGTHS)
    variant = Variant(bottom_right=True, max_seqlen_q=longest, max_seqlen_k=longest)
    return {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "variant": variant}


def _documents(*, is_float: bool) -> dict[str, Any]:
    """Eight documents of 1,024 tokens, each causal, as a mask that does not say so."""
    position = torch.arange(8192)
    mask = position[:, None] >= position
    mask &= position[:, None] // 1024 == position // 1024
    if is_float:
        mask = torch.zeros(mask.shape, dtype=torch.bfloat16).masked_fill_(~mask, float("-inf"))
    return {"attn_mask": mask[None, None], "is_causal": False}


SWEEPS: dict[str, dict[str, tuple[Spec, Mapping[str, Any]]]] = {
    f"torch-default,triton-fa2,{LIBRARIES},eager": {
        "8k": (LLAMA_8K, {}),
        "8k-window-1024": (LLAMA_8K, WINDOW),
        "8k-soft-cap": (LLAMA_8K, {"variant": Variant(softcap=50.0)}),
        "8k-gpt-oss": (GPT_OSS, {}),
        "8k-gpt-oss-sinks": (GPT_OSS, _sinks(64)),
        "8k-gpt-oss-sinks-window-128": (GPT_OSS, {**_sinks(64), **SHORT_WINDOW}),
    },
    f"torch-default,triton-fa2,{LIBRARIES}": {
        "32k": (LLAMA_32K, {}),
        "32k-window-1024": (LLAMA_32K, WINDOW),
    },
    "torch-default,torch-efficient,torch-cudnn,triton-fa2,triton-masked,flex": {
        "8k": (LLAMA_8K, {}),
        "8k-documents": (LLAMA_8K, _documents(is_float=False)),
        "8k-documents-float": (LLAMA_8K, _documents(is_float=True)),
    },
    "torch-default,triton-decode,fa2-kvcache,flashinfer-decode,flex,torch-masked": {
        "decode": (DECODE, {}),
        "decode-window-1024": (DECODE, WINDOW),
        "decode-gpt-oss-sinks": (DECODE_GPT_OSS, _sinks(64)),
        "decode-gpt-oss-sinks-window-128": (DECODE_GPT_OSS, {**_sinks(64), **SHORT_WINDOW}),
    },
    "triton-varlen,torch-varlen,fa2-varlen,fa3-varlen,fa4-varlen,flashinfer-fa2,flashinfer-fa3,"
    "flex,torch-masked": {
        "packed": (PACKED, _packed()),
        "packed-window-128": (
            PACKED,
            {**_packed(), "variant": Variant(True, (127, None), None, 2048, 2048)},
        ),
    },
}
"""Calls by name, under the kernels that are timed on them."""


def _workload(directory: Path, name: str, spec: Spec, beyond: Mapping[str, Any]) -> Workload:
    """A file of the call, which workers can load."""
    call = spec.call("cpu", torch.Generator().manual_seed(0), "variants")
    call = AttentionCall(**{**vars(call), **beyond})
    return recorded_call(PackedCall.of(call).write(directory / f"{name}.safetensors"))


def main() -> None:
    arguments = parser(__doc__, "", "variants.csv", seconds=0.5).parse_args()
    rows: list[dict[str, Any]] = []
    for kernels, calls in SWEEPS.items():
        with tempfile.TemporaryDirectory() as directory:
            workloads = [
                _workload(Path(directory), name, spec, beyond)
                for name, (spec, beyond) in calls.items()
            ]
            sweep(cold(workloads), arguments.kernels or kernels, arguments, rows)
    print(by_call(arguments.out))


if __name__ == "__main__":
    main()
