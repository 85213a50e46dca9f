"""Times our kernels and their rivals: FlashAttention 2 to 4, cuDNN and FlashInfer (needs a GPU).

    python -m benchmarks.attention_kernels.rivals [--part mla ...] [--env NAME=PYTHON] ...

All kernels of a case take turns in shuffled rounds with a cold L2, on random values, and each
output is judged. A kernel that is not installed is printed with the reason and has no row. Writes
`benchmarks/results/rivals.csv`, a row for each kernel of a case, and prints the table of ratios.
The table in the docs lists all files that match `rivals*.csv`, by machine.

`--env` names the Python of FlashAttention 3 or 4. FlashInfer compiles a module at its first call of
a kind: one for its prefill, one for decode and one for MLA.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from attention_kernels.decode.paging import page
from benchmarks.sweep import Group, cold, parser, sweep, written
from benchmarks.tables.rivals import rivals
from capture.call.attention_call import AttentionCall
from replay.workloads.random_calls import Spec
from replay.workloads.workload import Workload, random_workload


@dataclass(frozen=True)
class Case:
    """A call with random values, and how its keys and values are stored."""

    spec: Spec
    lengths: tuple[int, ...] = ()
    """Number of visible keys of each sequence; empty for all keys."""
    page_size: int | None = None
    """Number of keys in a page; None for contiguous keys."""

    @property
    def is_latent(self) -> bool:
        """Return True for absorbed MLA, whose value is the first part of the key."""
        return self.spec.head_dim == LATENT.head_dim

    def call(self, model: str) -> AttentionCall:
        """Make the call on the CPU, with pages in a random order."""
        call = self.spec.call("cpu", torch.Generator().manual_seed(0), model)
        if self.is_latent:
            call = replace(call, value=call.key[..., : self.spec.v_head_dim])
        lengths = torch.tensor(self.lengths, dtype=torch.int32) if self.lengths else None
        if self.page_size is None:
            return replace(call, seqused_k=lengths)
        pages = page(call.key, call.value, self.page_size, lengths=lengths)
        key, value = (each.transpose(1, 2) for each in (pages.key_pages, pages.value_pages))
        return replace(
            call, key=key, value=value, page_table=pages.block_table, seqused_k=pages.lengths
        )


FLUX = Case(Spec(1, 24, 24, 4608, 4608, 128, 128))
COGVIDEO = Case(Spec(2, 30, 30, 17776, 17776, 64, 64))
LLAMA_3 = Case(Spec(1, 32, 8, 8192, 8192, 128, 128, is_causal=True))
LLAMA_16K = Case(Spec(1, 32, 32, 16384, 16384, 128, 128, is_causal=True))
SERVED = Spec(16, 32, 8, 1, 8192, 128, 128)
LENGTHS = tuple(range(512, 8193, 512))
LATENT = Spec(8, 128, 1, 1, 32768, 576, 512)
FEW_HEADS = replace(LATENT, q_heads=16)

PREFILL = "triton-fa3,torch-flash,torch-cudnn,fa3,fa4"
PARTS: dict[str, dict[str, dict[str, Case]]] = {
    "prefill": {
        f"{PREFILL},flashinfer-fa3": {
            "FLUX.1": FLUX,
            "Llama 2": Case(Spec(1, 32, 32, 4096, 4096, 128, 128, is_causal=True)),
            "Llama 3": LLAMA_3,
            "16K": LLAMA_16K,
        },
        PREFILL: {
            "CogVideoX-2b": COGVIDEO,
            "SD 3.5": Case(Spec(4, 24, 24, 4250, 4250, 64, 64)),
            "narrow heads": Case(Spec(8, 64, 16, 1024, 1024, 64, 64, is_causal=True)),
            "many short": Case(Spec(16, 32, 32, 512, 512, 128, 128, is_causal=True)),
            "SigLIP": Case(Spec(1, 16, 16, 4096, 4096, 72, 72)),
            "SigLIP, batch 8": Case(Spec(8, 16, 16, 729, 729, 72, 72)),
            "Phi 2": Case(Spec(1, 32, 32, 2048, 2048, 80, 80, is_causal=True)),
            "Phi 2, batch 4": Case(Spec(4, 32, 32, 2048, 2048, 80, 80)),
            "BERT": Case(Spec(64, 12, 12, 128, 128, 64, 64)),
            "8K": Case(Spec(1, 32, 32, 8192, 8192, 128, 128, is_causal=True)),
            "Phi 3": Case(Spec(1, 32, 32, 4096, 4096, 96, 96, is_causal=True)),
            "DeepSeek V3": Case(Spec(1, 128, 128, 4096, 4096, 192, 128, is_causal=True)),
            "Gemma 2": Case(Spec(1, 16, 8, 8192, 8192, 256, 256, is_causal=True)),
        },
    },
    "decode": {
        "triton-decode,torch-flash,torch-varlen,torch-cudnn,fa3-kvcache,fa4,fa4-varlen,"
        "flashinfer-decode": {
            "long": Case(Spec(8, 32, 8, 1, 32768, 128, 128)),
            "many short": Case(Spec(64, 32, 8, 1, 2048, 128, 128)),
            "one sequence": Case(Spec(1, 32, 8, 1, 131072, 128, 128)),
            "uneven lengths": Case(SERVED, LENGTHS),
        },
    },
    "paged": {
        "triton-paged-decode,torch-varlen,fa2-kvcache,fa3-kvcache,fa4-varlen,flashinfer-decode": {
            "pages of 16": Case(SERVED, page_size=16),
            "pages of 128": Case(SERVED, page_size=128),
            "pages of 256, uneven lengths": Case(SERVED, LENGTHS, page_size=256),
        },
    },
    "mla": {
        "triton-decode,fa3-mla": {
            "16 heads": Case(FEW_HEADS),
            "128 heads": Case(LATENT),
        },
        "triton-paged-decode,fa3-mla,flash-mla,flashinfer-mla": {
            "16 heads, pages of 64": Case(FEW_HEADS, page_size=64),
            "128 heads, pages of 64": Case(LATENT, page_size=64),
        },
    },
    "fp8": {
        "triton-fp8,fa3-fp8,cudnn-fp8": {
            "FLUX.1": FLUX,
            "CogVideoX-2b": COGVIDEO,
            "Llama 3": LLAMA_3,
            "16K": LLAMA_16K,
        },
    },
}
"""Cases by part and kernels; our kernel comes first. FlashInfer's prefill compiles for a minute for
each head_dim, and again for batches, so it runs only with head_dim 128 and one sequence."""


def workloads(part: str, cases: Mapping[str, Case]) -> Iterator[Workload]:
    """Yield the calls of a part; calls that a `Spec` cannot express are written to files."""
    for name, case in cases.items():
        if case == Case(case.spec) and not case.is_latent:
            yield random_workload(name, part, case.spec, seed=0)
        else:
            with written(name, case.call(part)) as workload:
                yield workload


def groups(parts: list[str]) -> Iterator[Group]:
    """Yield the kernels and calls of the parts; speed-ups are over our kernel."""
    for part in parts:
        for kernels, cases in PARTS[part].items():
            yield Group(kernels, cold(workloads(part, cases)), kernels.partition(",")[0])


def main() -> None:
    taking = parser(__doc__, "", "rivals.csv", seconds=0.1)
    taking.add_argument(
        "--part", nargs="+", choices=PARTS, default=list(PARTS), help="default: all"
    )
    arguments = taking.parse_args()
    sweep(groups(arguments.part), arguments)
    print(rivals(arguments.out.parent, arguments.out.name))


if __name__ == "__main__":
    main()
