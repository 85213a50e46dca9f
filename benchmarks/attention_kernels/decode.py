"""Times decode, and compares the time with the minimum for reading the keys and values.

    python -m benchmarks.attention_kernels.decode [--only mixed ...] [--stages 3,4] ...

The minimum is the bytes of the visible keys and values divided by the bandwidth of copies on the
same GPU. Caches (pages, 8 bits) are built beforehand. All kernels of a case take turns in shuffled
rounds with a cold L2, after each output was compared with a reference. Needs a GPU with 60 GB of
memory, and two minutes. Writes `benchmarks/results/decode.csv`, a line for each kernel of a case.

`--blocks`, `--warps`, `--stages` and `--parts` are alternatives to our kernels' plans: every
combination is compiled (seconds each) and timed, and the fastest are printed. `--parts` multiplies
the number of parts that the keys are split into.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from attention_kernels.decode.kv_cache import Cache
from attention_kernels.decode.quantised_cache import QuantisedCache, quantise_cache
from attention_kernels.decode.quantised_decode import random_pages
from attention_kernels.decode.split_kv import attend_to_cache, planned
from attention_kernels.decode.split_kv_plan import Tiling
from benchmarks import results
from benchmarks.gpu import MACHINE, gpu, measured_on
from capture.call.attention_call import AttentionCall
from capture.call.attention_variant import AttentionVariant
from replay.kernels.kernel_options import kernel_options
from replay.timing.roof import measure_roof
from replay.timing.rounds import measure

DEVICE = torch.device("cuda")
ROUNDS = 20
FASTEST = 12
"""Number of alternatives printed for each cache."""
PAGE_SIZE = 16
LATENT_PAGE_SIZE = 64
"""Page size of FlashMLA, in tokens."""
LONG, SHORT = 131072, 1024
IN_8_BITS = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
ERRORS = {"fp8": 0.08, "int8": 0.03}
"""Maximum error of 8-bit caches relative to the output's norm; 16 bits may have 0.01."""

COLUMNS = (
    "case",
    "keys",
    "cache",
    "tiling",
    "ms",
    "least, ms",
    "floor / time",
    *MACHINE,
)

Run = Callable[[], Tensor]
Alternatives = dict[str, list[float] | None]


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


def mixed_lengths(batch: int, seed: int) -> list[int]:
    """Return lengths drawn log-uniformly between `SHORT` and `LONG`; the last is `LONG`."""
    draw = random.Random(seed)
    low, high = math.log(SHORT), math.log(LONG)
    return [int(math.exp(draw.uniform(low, high))) for _ in range(batch - 1)] + [LONG]


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
        ("mixed", mixed_lengths(batch, 0)),
        ("mixed, other draw", mixed_lengths(batch, 1)),
        ("mixed, longest last", sorted(mixed_lengths(batch, 0))),
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


def tilings(plan: Tiling, alternatives: Alternatives) -> dict[str, Tiling]:
    """Return the plan, followed by every combination of the alternatives."""
    found = {f"plan {_said(plan)}": plan}
    blocks, warps, stages, parts = (
        alternatives[name] or [default]
        for name, default in (
            ("blocks", plan.block_n),
            ("warps", plan.warps),
            ("stages", plan.stages),
            ("parts", 1.0),
        )
    )
    for block_n, warp_count, stage_count, factor in product(blocks, warps, stages, parts):
        tiles = plan._replace(block_n=int(block_n), warps=int(warp_count), stages=int(stage_count))
        if math.isnan(factor):
            tiles = tiles._replace(assignment=None)
        elif tiles.assignment is None:
            tiles = tiles._replace(splits=max(1, round(plan.splits * factor)))
        else:
            assignment = tiles.assignment
            shares = max(1, round(assignment.shares * factor))
            least = max(1, round(assignment.least / factor * plan.block_n / block_n))
            worth = assignment.worth * block_n / plan.block_n
            tiles = tiles._replace(
                assignment=assignment._replace(shares=shares, least=least, worth=worth)
            )
        if tiles != plan:
            found[_said(tiles)] = tiles
    return found


def _said(tiles: Tiling) -> str:
    parts = f"splits {tiles.splits}"
    if tiles.assignment is not None:
        parts = f"shares {tiles.assignment.shares}, least {tiles.assignment.least}"
    return f"{tiles.block_n} keys, {tiles.warps} warps, {tiles.stages} stages, {parts}"


def expected(case: Case, n: int) -> Tensor:
    """Compute the output (1, Hq, Sq, Dv) of sequence `n` in float32."""
    call, own = case.call, slice(n, n + 1)
    seen = slice(case.lengths[n])
    q_len = call.query.shape[2]
    mask = torch.ones(q_len, case.lengths[n], dtype=torch.bool, device=DEVICE)
    if call.is_causal:
        mask = mask.tril(case.lengths[n] - q_len)
    return scaled_dot_product_attention(
        call.query[own].float(),
        call.key[own, :, seen].float(),
        call.value[own, :, seen].float(),
        attn_mask=mask,
        enable_gqa=True,
    )


def error(output: Tensor, references: dict[int, Tensor]) -> float:
    """Return the largest error of the sequences in `references`, relative to the norm."""
    return max(
        float((output[n : n + 1].float() - right).norm() / right.norm())
        for n, right in references.items()
    )


def runs(case: Case, alternatives: Alternatives) -> Iterator[tuple[str, Run, int, float]]:
    """Yield each kernel's name, function, bytes to read and largest error."""
    call, tokens = case.call, sum(case.lengths)
    in_pages = paged(case) if any("paged" in name for name in case.caches) else call
    for name in case.caches:
        cache = cache_of(name, call, in_pages)
        attending = partial(
            attend_to_cache,
            call.query,
            cache,
            is_causal=call.is_causal,
            options=kernel_options(call.variant),
        )
        tiling = planned(
            call.query, cache, is_causal=call.is_causal, options=kernel_options(call.variant)
        ).tiling
        allowed = ERRORS.get(name.removesuffix(" paged"), 0.01)
        for said, tiles in tilings(tiling, alternatives).items():
            yield (
                f"{name}: {said}",
                partial(attending, tiles=tiles),
                bytes_read(cache, tokens),
                allowed,
            )


def show(case: Case, alternatives: Alternatives, copied: float) -> list[dict[str, Any]]:
    """Check and time one case, print it and return its lines; `copied` is the bandwidth of copies
    in bytes per second."""
    print(f"{case.name} ({sum(case.lengths)} keys)", flush=True)
    longest, shortest = (pick(case.lengths) for pick in (max, min))
    references = {
        n: expected(case, n) for n in {case.lengths.index(each) for each in (longest, shortest)}
    }
    candidates: dict[str, Run] = {}
    floors: dict[str, float] = {}
    for name, run, read, allowed in runs(case, alternatives):
        try:
            found = error(run(), references)
        except Exception as failure:
            print(f"    {name}: {type(failure).__name__}: {failure}".partition("\n")[0], flush=True)
            continue
        if not found <= allowed:
            print(f"    {name}: WRONG, error {found:.2%} of at most {allowed:.0%}", flush=True)
            continue
        candidates[name], floors[name] = run, read / copied * 1000
    samples = measure(candidates, DEVICE, cache="cold", rounds=ROUNDS, max_seconds=1.0)
    times = {name: statistics.median(each.ms) for name, each in samples.items() if each.ms}
    shown: dict[str, int] = {}
    lines: list[dict[str, Any]] = []
    for name in sorted(times, key=lambda name: times[name]):
        kind, _, tiling = name.partition(": ")
        shown[kind] = shown.get(kind, 0) + 1
        if shown[kind] <= FASTEST or ": plan" in name:
            ms, least = times[name], min(samples[name].ms)
            print(f"    {floors[name] / ms:6.1%} {ms:9.4f} ms (least {least:.4f})  {name}")
            lines.append(
                {
                    "case": case.name,
                    "keys": sum(case.lengths),
                    "cache": kind,
                    "tiling": tiling,
                    "ms": ms,
                    "least, ms": least,
                    "floor / time": floors[name] / ms,
                }
            )
    print(flush=True)
    return lines


def _numbers(text: str) -> list[float]:
    return [math.nan if each == "none" else float(each) for each in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=GROUPS, default=list(GROUPS))
    for name in ("blocks", "warps", "stages", "parts"):
        parser.add_argument(f"--{name}", type=_numbers, metavar="N,...")
    parser.add_argument("--out", type=Path, default=results.DIRECTORY / "decode.csv")
    arguments = parser.parse_args()
    machine = measured_on(gpu())
    alternatives = {
        name: getattr(arguments, name) for name in ("blocks", "warps", "stages", "parts")
    }
    roof = measure_roof(torch.bfloat16, DEVICE)
    if roof is None:
        raise SystemExit("no memory is left to measure copies with")
    copied, products = roof.gb_per_s / 1000, roof.tflops
    print(
        f"{machine['machine.device']}: copies {copied:.2f} TB/s, products {products:.0f} TFLOPS\n"
    )
    lines: list[dict[str, Any]] = []
    for group in arguments.only:
        for case in GROUPS[group]():
            found = show(case, alternatives, roof.gb_per_s * 1e9)
            lines += [line | machine for line in found]
            results.write_lines(lines, COLUMNS, arguments.out)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    with torch.no_grad():
        main()
