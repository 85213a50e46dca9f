"""Times decode, and compares the time with the minimum for reading the keys and values.

    python -m benchmarks.attention_kernels.decode [--only mixed ...] [--out FILE]

The minimum is the bytes of the visible keys and values divided by the bandwidth of copies on the
same GPU. Caches (pages, 8 bits) are built beforehand. All kernels of a case take turns in shuffled
rounds with a cold L2, after each output was compared with a reference. Needs a GPU with 60 GB of
memory, and two minutes. Writes `benchmarks/results/decode.csv`, a line for each kernel of a case.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attention_kernels.decode.kv_cache import Cache
from attention_kernels.decode.quantised_cache import QuantisedCache, quantise_cache
from attention_kernels.decode.quantised_decode import random_pages
from attention_kernels.decode.split_kv import attend_to_cache, planned
from attention_kernels.decode.split_kv_plan import Tiling
from benchmarks.engine_kernels import uneven
from benchmarks.gpu import MACHINE, timed, write_measured
from capture.call.attention_call import AttentionCall
from capture.call.attention_variant import AttentionVariant
from replay.accuracy.verdict import Expected, judge
from replay.kernels.kernel_options import kernel_options
from replay.timing.roof import measure_roof

DEVICE = torch.device("cuda")
ROUNDS = 20
PAGE_SIZE = 16
LATENT_PAGE_SIZE = 64
"""Page size of FlashMLA, in tokens."""
LONG, SHORT = 131072, 1024
IN_8_BITS = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}

COLUMNS = ("case", "keys", "cache", "tiling", "ms", "least, ms", "floor / time", *MACHINE)

Run = Callable[[], Tensor]


@dataclass(frozen=True)
class Case:
    """A call, the number of visible keys of each sequence, and the caches to time."""

    name: str
    call: AttentionCall
    lengths: list[int]
    caches: tuple[str, ...] = ("16 bits",)
    """Cache formats that our kernels read: 16 bits, `fp8`, `int8`, and each of the three
    `paged`."""


def normal(*shape: int) -> Tensor:
    """Return reproducible bfloat16 values; each entry of the first dimension has its own seed."""
    tensor = torch.empty(shape, dtype=torch.bfloat16, device=DEVICE)
    for seed, each in enumerate(tensor):
        each.normal_(generator=torch.Generator(DEVICE).manual_seed(seed))
    return tensor


def _even() -> Iterator[Case]:
    key, value = normal(8, 8, 32768, 128), normal(8, 8, 32768, 128)
    call = AttentionCall(normal(8, 32, 1, 128), key, value, enable_gqa=True)
    caches = ("16 bits", "16 bits paged", "fp8", "fp8 paged", "int8", "int8 paged")
    yield Case("even, 8×32/8×32768", call, [32768] * 8, caches)


def _queries() -> Iterator[Case]:
    key, value = normal(8, 8, 32768, 128), normal(8, 8, 32768, 128)
    for q_len in (2, 4, 8):
        call = AttentionCall(
            normal(8, 32, q_len, 128),
            key,
            value,
            is_causal=True,
            enable_gqa=True,
            variant=AttentionVariant(bottom_right=True),
        )
        caches = ("16 bits", "16 bits paged", "fp8")
        yield Case(f"queries {q_len}", call, [32768] * 8, caches)


def _mixed() -> Iterator[Case]:
    batch = 64
    key, value = normal(batch, 8, LONG, 128), normal(batch, 8, LONG, 128)
    call = AttentionCall(normal(batch, 32, 1, 128), key, value, enable_gqa=True)
    for name, lengths in (
        ("mixed", uneven(batch, SHORT, LONG, 0)),
        ("mixed, other draw", uneven(batch, SHORT, LONG, 1)),
        ("mixed, longest last", sorted(uneven(batch, SHORT, LONG, 0))),
        ("short, 2048 each", [2048] * batch),
        ("same, 24576 each", [24576] * batch),
    ):
        used = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
        caches = ("16 bits", "16 bits paged") if name == "mixed" else ("16 bits",)
        yield Case(name, replace(call, seqused_k=used), lengths, caches)


def _latent(batch: int) -> Iterator[Case]:
    """Yield cases of absorbed MLA, whose value is the first 512 numbers of the key."""
    key = normal(batch, 1, 32768, 576)
    for heads in (16, 128):
        call = AttentionCall(normal(batch, heads, 1, 576), key, key[..., :512], enable_gqa=True)
        caches = ("16 bits", "16 bits paged")
        yield Case(f"mla {heads}, batch {batch}", call, [32768] * batch, caches)


GROUPS: dict[str, Callable[[], Iterator[Case]]] = {
    "even": _even,
    "queries": _queries,
    "mixed": _mixed,
    "mla-8": partial(_latent, 8),
    "mla-64": partial(_latent, 64),
}
"""Groups of cases that share tensors, made on demand."""


def paged(case: Case) -> AttentionCall:
    """Return the same call with its visible keys in pages of random order."""
    call, is_latent = case.call, case.call.value_is_in_key
    size = LATENT_PAGE_SIZE if is_latent else PAGE_SIZE
    counts = [-(-length // size) for length in case.lengths]
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    table = torch.zeros(len(counts), max(counts), dtype=torch.int32, device=DEVICE)
    for n, own in enumerate(order.split(counts)):
        table[n, : len(own)] = own

    def pool(tensor_BHSD: Tensor) -> Tensor:
        _, heads, _, dim = tensor_BHSD.shape
        pages = tensor_BHSD.new_empty(len(order), size, heads, dim)
        for n, own in enumerate(order.split(counts)):
            tokens = tensor_BHSD[n, :, : len(own) * size].unflatten(1, (len(own), size))
            pages[own] = tokens.permute(1, 2, 0, 3)
        return pages.transpose(1, 2)

    key = pool(call.key)
    value = key[..., : call.value.shape[3]] if is_latent else pool(call.value)
    lengths = torch.tensor(case.lengths, dtype=torch.int32, device=DEVICE)
    return replace(call, key=key, value=value, page_table=table, seqused_k=lengths)


def cache_of(name: str, call: AttentionCall, in_pages: AttentionCall) -> Cache | QuantisedCache:
    """Return the cache that one of our kernels reads."""
    dtype = IN_8_BITS.get(name.removesuffix(" paged"))
    if dtype is not None:
        table = random_pages(call.key) if name.endswith("paged") else None
        key, value = call.key, call.value
        return quantise_cache(key, value, dtype, lengths=call.seqused_k, block_table=table)
    if not name.endswith("paged"):
        return Cache(call.key, call.value, lengths=call.seqused_k)
    key, value = (each.transpose(1, 2) for each in (in_pages.key, in_pages.value))
    return Cache(key, value, in_pages.page_table, in_pages.seqused_k)


def bytes_read(cache: Cache | QuantisedCache, tokens: int) -> int:
    """Return the bytes of the keys, values and scales of this many tokens."""
    kv_heads, _, v_dim = cache.sizes
    numbers = cache.key.shape[3] + (0 if cache.tail else v_dim)
    scales = 8 if isinstance(cache, QuantisedCache) else 0
    return tokens * kv_heads * (numbers * cache.key.element_size() + scales)


def _said(tiles: Tiling) -> str:
    parts = f"splits {tiles.splits}"
    if tiles.assignment is not None:
        parts = f"shares {tiles.assignment.shares}, least {tiles.assignment.least}"
    return f"plan {tiles.block_n} keys, {tiles.warps} warps, {tiles.stages} stages, {parts}"


def check(case: Case, name: str, output: Tensor) -> None:
    """Judge the outputs of the longest and of the shortest sequence.

    Raises:
        SystemExit: an output is wrong.
    """
    call = case.call
    for n in {case.lengths.index(pick(case.lengths)) for pick in (max, min)}:
        own, seen = slice(n, n + 1), slice(case.lengths[n])
        key, value = (each[own, :, seen] for each in (call.key, call.value))
        alone = replace(call, query=call.query[own], key=key, value=value, seqused_k=None)
        is_16_bit = name.startswith("16 bits")
        verdict = judge(output[own], Expected.of(alone), "exact" if is_16_bit else "quantised")
        if not verdict.passed:
            raise SystemExit(f"{case.name}, {name}: {verdict.sentence}")


def lines(group: str, device: torch.device) -> Iterator[dict[str, Any]]:
    """Yield the lines of a group's cases."""
    roof = measure_roof(torch.bfloat16, device)
    if roof is None:
        raise SystemExit("no memory is left to measure copies with")
    for case in GROUPS[group]():
        yield from lines_of(case, roof.gb_per_s * 1e9)
    del case
    torch.cuda.empty_cache()


def lines_of(case: Case, copied: float) -> Iterator[dict[str, Any]]:
    """Check and time a case, and yield the line of each cache, the fastest first.

    Args:
        copied: bandwidth of copies, in bytes per second.
    """
    call, tokens = case.call, sum(case.lengths)
    in_pages = paged(case) if any("paged" in name for name in case.caches) else call
    options: dict[str, Any] = {
        "is_causal": call.is_causal,
        "options": kernel_options(call.variant),
    }
    caches = {name: cache_of(name, call, in_pages) for name in case.caches}
    runs: dict[str, Run] = {}
    for name, cache in caches.items():
        runs[name] = partial(attend_to_cache, call.query, cache, **options)
        check(case, name, runs[name]())
    samples = timed(runs, DEVICE, ROUNDS, 1.0)
    times = {name: statistics.median(sample.ms) for name, sample in samples.items()}
    for name in sorted(times, key=times.__getitem__):
        floor = bytes_read(caches[name], tokens) / copied * 1000
        yield {
            "case": case.name,
            "keys": tokens,
            "cache": name,
            "tiling": _said(planned(call.query, caches[name], **options).tiling),
            "ms": times[name],
            "least, ms": min(samples[name].ms),
            "floor / time": floor / times[name],
        }


def main() -> None:
    write_measured(__doc__, "decode.csv", COLUMNS, lines, GROUPS)


if __name__ == "__main__":
    main()
