"""Checks and times our kernels on the batches of serving engines: pages, uneven lengths, FP8.

    python -m benchmarks.engine_kernels [--only fp8 mixed mla uneven ...]

First, every path is compared with attention in float64 on the GPU. Then each case is timed with a
cold L2, in shuffled rounds of all its kernels: ours, vLLM's copy of FlashAttention 3 with its
scheduler metadata, and FlashMLA, where they can be imported. Pages lie in a random order. Lengths
stay on the GPU. A table has one line for each kernel of a case: its time, the bytes it must read at
the speed of a copy as a share of that time, and the ratio that the case asks for. Its lines are
printed and written after each case. A group that reaches its time limit leaves out its last cases.
The benchmark needs a GPU with 40 GB of memory and two and a half minutes.
"""

from __future__ import annotations

import argparse
import importlib
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from attention_kernels.decode.kv_cache import Cache, expanded_scales
from attention_kernels.decode.paged_batch import paged_batch
from attention_kernels.decode.paged_decode import paged_decode
from attention_kernels.flash_attention import flash_attn_varlen_func
from attention_kernels.options import AttentionOptions
from benchmarks import results
from benchmarks.gpu import MACHINE, gpu, measured_on
from replay.timing.roof import measure_roof
from replay.timing.rounds import measure

ROUNDS = 15
CACHE: Literal["cold", "warm"] = "cold"
BOTTOM_RIGHT = AttentionOptions(bottom_right=True)
FP8 = torch.float8_e4m3fn
COLUMNS = ("case", "kernel", "ms", "floor / time", "ratio", "of", *MACHINE)
Run = Callable[[], Any]


@dataclass
class Batch:
    """Packed queries, and a cache in pages of random order."""

    q_lens: Sequence[int]
    k_lens: Sequence[int]
    heads: tuple[int, int] = (32, 8)
    head_dim: int = 128
    page_size: int = 16
    latent: int = 0
    is_fp8: bool = False
    fp8_type: torch.dtype = FP8
    query_unit: float = 1.0
    """Factor of the queries. The key scales are divided by it."""
    options: AttentionOptions = BOTTOM_RIGHT
    is_causal: bool = True
    has_sinks: bool = False
    device: torch.device = field(default_factory=lambda: torch.device("cuda"))

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        q_heads, kv_heads = self.heads
        counts = [-(-length // self.page_size) for length in self.k_lens]
        order = torch.randperm(sum(counts), device=self.device).int()
        self.table = torch.zeros(len(counts), max(counts), dtype=torch.int32, device=self.device)
        for row, own in zip(self.table, order.split(counts), strict=True):
            row[: len(own)] = own
        shape = (sum(counts), self.page_size, kv_heads, self.head_dim)
        self.query = self._normal(sum(self.q_lens), q_heads, self.head_dim) * self.query_unit
        self.key = self._normal(*shape)
        self.value = self.key[..., : self.latent] if self.latent else self._normal(*shape)
        self.scales: dict[str, Any] = {}
        if self.is_fp8:
            self.key = self.key.to(self.fp8_type)
            self.value = (
                self.key[..., : self.latent] if self.latent else self.value.to(self.fp8_type)
            )
            units = torch.rand(2, kv_heads, device=self.device) + 0.5
            if self.latent:
                units[1] = units[0]
            self.scales = {"key_scale": units[0] / self.query_unit, "value_scale": units[1]}
        self.lengths = torch.tensor(self.k_lens, dtype=torch.int32, device=self.device)
        starts = torch.tensor([0, *self.q_lens]).cumsum(0)
        self.starts = starts.to(self.device, torch.int32)
        self.sinks = self._normal(q_heads) if self.has_sinks else None

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device=self.device)

    @property
    def longest(self) -> int:
        return max(self.q_lens)

    @property
    def cache(self) -> Cache:
        """Return the cache as the decode kernel takes it."""
        scales = expanded_scales(
            self.query, self.key, self.value, self.scales.get("key_scale"),
            self.scales.get("value_scale"), len(self.k_lens),
        )  # fmt: skip
        return Cache.in_pages(self.key, self.value, self.table, self.lengths, scales=scales)

    @property
    def bytes_read(self) -> int:
        """Return the bytes of all keys and values up to each sequence's last token."""
        numbers = self.head_dim * (1 if self.latent else 2)
        return sum(self.k_lens) * self.heads[1] * numbers * self.key.element_size()

    def attend(self) -> Any:
        """Run `paged_batch`."""
        return paged_batch(
            self.query, self.key, self.value, self.table, self.lengths, self.starts, self.longest,
            self.is_causal, sinks=self.sinks, options=self.options, **self.scales,
        )  # fmt: skip

    def prefill(self) -> Any:
        """Run `flash_attn_varlen_func`, which may copy keys out of their pages."""
        return flash_attn_varlen_func(
            self.query, self.key, self.value, self.starts, None, self.longest, max(self.k_lens),
            seqused_k=self.lengths, block_table=self.table, causal=self.is_causal,
            k_descale=self.scales.get("key_scale"), v_descale=self.scales.get("value_scale"),
        )  # fmt: skip

    def decode(self) -> Any:
        """Run `paged_decode`, for sequences with the same number of queries."""
        query = self.query.unflatten(0, (len(self.q_lens), self.longest)).transpose(1, 2)
        output = paged_decode(
            query, self.key, self.value, self.table, self.lengths, is_causal=self.is_causal,
            sinks=self.sinks, options=self.options, **self.scales,
        )  # fmt: skip
        return output.transpose(1, 2).flatten(0, 1)

    def expected(self, n: int) -> Tensor:
        """Compute the output (Sq, Hq, Dv) of one sequence in float64."""
        pages = self.table[n, : -(-self.k_lens[n] // self.page_size)].long()
        key, value = (
            pool[pages].flatten(0, 1)[: self.k_lens[n]].double() for pool in (self.key, self.value)
        )
        if self.is_fp8:
            key = key * self.scales["key_scale"].double()[:, None]
            value = value * self.scales["value_scale"].double()[:, None]
        group = self.heads[0] // self.heads[1]
        key, value = (each.transpose(0, 1).repeat_interleave(group, 0) for each in (key, value))
        query = self.query[self.starts[n] : self.starts[n + 1]].transpose(0, 1).double()
        scores = query @ key.mT * self.head_dim**-0.5
        if self.options.softcap is not None:
            scores = self.options.softcap * torch.tanh(scores / self.options.softcap)
        q_len, kv_len = scores.shape[1:]
        diagonals = torch.arange(q_len, device=self.device)[:, None] + kv_len - q_len
        beyond = torch.arange(kv_len, device=self.device) - diagonals
        left, right = (math.inf if side is None else side for side in self.options.window)
        is_hidden = (beyond > (0 if self.is_causal else right)) | (beyond < -left)
        scores = scores.masked_fill_(is_hidden, -math.inf)
        total = scores.logsumexp(-1, keepdim=True)
        if self.sinks is not None:
            total = torch.logaddexp(total, self.sinks.double()[:, None, None])
        return ((scores - total).exp().nan_to_num() @ value).transpose(0, 1)

    def error(self, output: Tensor, sequences: Sequence[int]) -> float:
        """Return the largest error of these sequences, relative to the norm of their outputs."""
        errors = []
        for n in sequences:
            right = self.expected(n)
            own = output[self.starts[n] : self.starts[n + 1]].double()
            errors.append(float((own - right).norm() / right.norm()))
        return max(errors, key=lambda each: math.inf if math.isnan(each) else each)


MIXED = [1, 700, 1, 0, 4, 130, 1, 17, 2]
KEYS = [5000, 1300, 1, 40, 900, 130, 64, 4096, 333]
CHECKED: dict[str, dict[str, Any]] = {
    **{f"mixed, pages of {size}": {"page_size": size} for size in (16, 64, 256)},
    **{f"mixed FP8, pages of {n}": {"page_size": n, "is_fp8": True} for n in (16, 64)},
    "mixed FP8, large queries": {"is_fp8": True, "query_unit": 2.0**100},
    "mixed E5M2": {"is_fp8": True, "fp8_type": torch.float8_e5m2},
    "mixed, pages of 5, window": {"page_size": 5, "options": AttentionOptions(True, (255, None))},
    "mixed, window of two sides": {
        "options": AttentionOptions(True, (60, 30)),
        "is_causal": False,
    },
    "mixed, sinks and soft cap": {"options": AttentionOptions(True, softcap=20.0)}
    | {"has_sinks": True},
    "mixed FP8, all": {"options": AttentionOptions(True, (255, None), 20.0)}
    | {"has_sinks": True, "is_fp8": True, "page_size": 64},
    "mixed, head_dim 64": {"head_dim": 64, "heads": (64, 8)},
    "mixed, head_dim 256": {"head_dim": 256, "heads": (16, 8)},
    "mixed, head_dim 96, multi-query": {"head_dim": 96, "heads": (48, 1)},
}
FEW = [1, 3, 0, 16, 2]
FEW_KEYS = [70_000, 900, 3, 20_000, 64]
DECODED: dict[str, dict[str, Any]] = {
    **{f"decode, pages of {size}": {"page_size": size} for size in (16, 64)},
    **{f"decode FP8, pages of {n}": {"page_size": n, "is_fp8": True} for n in (16, 64)},
    **{
        f"latent decode, {heads} heads{' FP8' * fp8}": {
            "heads": (heads, 1), "head_dim": 576, "latent": 512, "page_size": 64, "is_fp8": fp8,
        }
        for heads in (16, 128)
        for fp8 in (False, True)
    },
}  # fmt: skip


LONG, LONG_KEYS = [2500, 1500], [3000, 1600]
CHUNKS = {f"long chunks{' FP8' * fp8}": {"is_fp8": fp8} for fp8 in (False, True)}


def check(device: torch.device) -> int:
    """Compare every path with float64, print the errors, and return the number of wrong ones."""
    wrong = 0
    calls = [(name, FEW, FEW_KEYS, Batch.attend, given) for name, given in DECODED.items()]
    calls += [(name, LONG, LONG_KEYS, Batch.prefill, given) for name, given in CHUNKS.items()]
    calls += [(name, MIXED, KEYS, Batch.attend, given) for name, given in CHECKED.items()]
    end = time.monotonic() + SECONDS["check"]
    for number, (name, q_lens, k_lens, attend, given) in enumerate(calls):
        if time.monotonic() > end:
            print(f"time limit: {len(calls) - number} paths are not compared", flush=True)
            break
        try:
            batch = Batch(q_lens, k_lens, **given, device=device)
            asked = [n for n, q_len in enumerate(q_lens) if q_len]
            output = attend(batch)
            found = batch.error(output, asked)
            said = f"{found:.5f}"
        except Exception as failure:
            found, said = math.nan, f"{type(failure).__name__}: {failure}".partition("\n")[0]
        is_right = found < 0.006
        wrong += not is_right
        print(f"{'ok' if is_right else 'WRONG':6} {name}: {said}", flush=True)
    return wrong


def rival(module: str, *names: str) -> Any:
    """Return a module that has the functions, or None."""
    try:
        found = importlib.import_module(module)
    except (ImportError, OSError, RuntimeError):
        return None
    return found if all(hasattr(found, name) for name in names) else None


def flash_attention_3(batch: Batch) -> Run:
    """Return vLLM's FlashAttention 3 on a batch, as vLLM calls it, with metadata computed
    beforehand. With an FP8 cache, the queries are in FP8 too."""
    module = rival("vllm.vllm_flash_attn", "flash_attn_varlen_func", "get_scheduler_metadata")
    if module is None:
        raise ImportError("vLLM's FlashAttention is not installed")
    longest_key = max(batch.k_lens)
    query = batch.query
    given: dict[str, Any] = {}
    if batch.is_fp8:
        query = query.to(FP8)
        shape = len(batch.k_lens), batch.heads[1]
        one = torch.ones((), device=query.device)
        given = {"q_descale": one.expand(shape)}
        given |= {f"{name[0]}_descale": each.expand(shape) for name, each in batch.scales.items()}
    metadata = module.get_scheduler_metadata(
        batch_size=len(batch.k_lens), max_seqlen_q=batch.longest, max_seqlen_k=longest_key,
        num_heads_q=batch.heads[0], num_heads_kv=batch.heads[1], headdim=batch.head_dim,
        cache_seqlens=batch.lengths, qkv_dtype=query.dtype, cu_seqlens_q=batch.starts,
        page_size=batch.page_size, causal=True,
    )  # fmt: skip
    return partial(
        module.flash_attn_varlen_func, query, batch.key, batch.value, batch.longest, batch.starts,
        longest_key, seqused_k=batch.lengths, causal=True, block_table=batch.table,
        out=torch.empty_like(batch.query), scheduler_metadata=metadata, fa_version=3, **given,
    )  # fmt: skip


def flash_mla(batch: Batch) -> Run:
    """Return FlashMLA on a batch with one query a sequence."""
    module = rival("flash_mla", "flash_mla_with_kvcache", "get_mla_metadata")
    if module is None:
        raise ImportError("FlashMLA is not installed")
    schedule, splits = module.get_mla_metadata(batch.lengths, batch.heads[0], 1)
    return partial(
        module.flash_mla_with_kvcache, batch.query[:, None], batch.key, batch.table, batch.lengths,
        batch.latent, schedule, splits, causal=True,
    )  # fmt: skip


@dataclass
class Case:
    """Kernels on one batch. Those in `rivals` are made when they are first used."""

    name: str
    batch: Batch
    runs: dict[str, Run]
    bytes_of: dict[str, int]
    ratio: tuple[str, str] | None = None
    """Kernels A and B: the ratio is the time of A divided by the time of B."""
    rivals: Mapping[str, Callable[[Batch], Run]] = field(default_factory=dict)


def uneven(size: int, low: int, high: int, seed: int = 0) -> list[int]:
    """Return lengths drawn log-uniformly; the last is the longest possible."""
    draw = random.Random(seed)
    bounds = math.log(low), math.log(high)
    return [int(math.exp(draw.uniform(*bounds))) for _ in range(size - 1)] + [high]


def _uneven() -> Iterator[Case]:
    for seed in (0, 1):
        lengths = uneven(64, 1024, 131072, seed)
        for page_size in (16, 64):
            batch = Batch([1] * 64, lengths, page_size=page_size)
            runs = {"ours": batch.decode, "ours, packed": batch.attend}
            read = dict.fromkeys([*runs, "fa3"], batch.bytes_read)
            name = f"64 of 1K-128K, pages of {page_size}, draw {seed}"
            yield Case(name, batch, runs, read, ("fa3", "ours"), {"fa3": flash_attention_3})


def _mixed() -> Iterator[Case]:
    chunks, k_lens = _chunks()
    k_lens += uneven(56, 1024, 16384)
    for page_size in (16, 64):
        rivals = {"fa3": flash_attention_3}
        batch = Batch(chunks, k_lens[:8], page_size=page_size)
        runs: dict[str, Run] = {"ours": batch.prefill, "in place": batch.attend}
        yield Case(f"8 chunks, pages of {page_size}", batch, runs, {}, ("fa3", "ours"), rivals)
        batch = Batch([*chunks, *[1] * 56], k_lens, page_size=page_size)
        name = f"these and 56 decodes, pages of {page_size}"
        yield Case(name, batch, {"ours": batch.prefill}, {}, ("fa3", "ours"), rivals)


def _chunks() -> tuple[list[int], list[int]]:
    """Return the lengths of eight chunks, and of their sequences up to the chunk's end."""
    draw = random.Random(0)
    chunks = [draw.randrange(512, 2049) for _ in range(8)]
    contexts = [draw.randrange(0, 8192) for _ in range(8)]
    return chunks, [a + b for a, b in zip(chunks, contexts, strict=True)]


def _fp8() -> Iterator[Case]:
    for page_size in (16, 64):
        plain = Batch([1] * 8, [32768] * 8, page_size=page_size)
        fp8 = Batch([1] * 8, [32768] * 8, page_size=page_size, is_fp8=True)
        runs: dict[str, Run] = {"bf16": plain.decode, "fp8": fp8.decode}
        read = dict.fromkeys(("bf16", "fa3"), plain.bytes_read)
        read |= dict.fromkeys(("fp8", "fa3, fp8"), fp8.bytes_read)
        name = f"decode 8 × 32K, pages of {page_size}"
        yield Case(name, fp8, runs, read, ("bf16", "fp8"), _both(plain, fp8))
    chunks, contexts = [2048] * 4, [8192] * 4
    for page_size in (16, 64):
        plain = Batch(chunks, contexts, page_size=page_size)
        fp8 = Batch(chunks, contexts, page_size=page_size, is_fp8=True)
        runs = {"bf16": plain.prefill, "bf16, in place": plain.attend, "fp8": fp8.attend}
        name = f"4 chunks of 2048 over 8192, pages of {page_size}"
        yield Case(name, fp8, runs, {}, ("bf16", "fp8"), _both(plain, fp8))
    chunks, contexts = _chunks()
    chunks, contexts = [*chunks, *[1] * 56], [*contexts, *uneven(56, 1024, 16384)]
    plain, fp8 = Batch(chunks, contexts), Batch(chunks, contexts, is_fp8=True)
    runs = {"bf16": plain.attend, "fp8": fp8.attend}
    name = "8 chunks and 56 decodes, pages of 16"
    yield Case(name, fp8, runs, {}, ("bf16", "fp8"), _both(plain, fp8))


def _both(plain: Batch, fp8: Batch) -> dict[str, Callable[[Batch], Run]]:
    """Return FlashAttention 3 on a batch in 16 bits and on the same batch in FP8."""
    return {
        "fa3": lambda _: flash_attention_3(plain),
        "fa3, fp8": lambda _: flash_attention_3(fp8),
    }


def _mla() -> Iterator[Case]:
    for heads in (16, 128):
        for size, lengths in (("64 of 1K-32K", uneven(64, 1024, 32768)), ("8 of 32K", [32768] * 8)):
            shape = {"heads": (heads, 1), "head_dim": 576, "latent": 512, "page_size": 64}
            batch = Batch([1] * len(lengths), lengths, **shape)  # type: ignore[arg-type]
            fp8 = Batch([1] * len(lengths), lengths, **shape, is_fp8=True)  # type: ignore[arg-type]
            runs: dict[str, Run] = {"ours": batch.decode, "ours, fp8": fp8.decode}
            read = {"ours": batch.bytes_read, "flash-mla": batch.bytes_read}
            read["ours, fp8"] = fp8.bytes_read
            name, rivals = f"MLA {heads} heads, {size}", {"flash-mla": flash_mla}
            yield Case(name, batch, runs, read, ("flash-mla", "ours"), rivals)


GROUPS: dict[str, Callable[[], Iterator[Case]]] = {
    "fp8": _fp8,
    "mixed": _mixed,
    "mla": _mla,
    "uneven": _uneven,
}
SECONDS = {"check": 50, "fp8": 40, "mixed": 25, "mla": 20, "uneven": 20}
"""Time limit of the comparison and of each group. No case begins after it."""


def cases_in_time(group: str) -> Iterator[Case]:
    """Yield the cases of a group until its time limit."""
    end = time.monotonic() + SECONDS[group]
    for case in GROUPS[group]():
        yield case
        if time.monotonic() > end:
            print(f"{group}: time limit after '{case.name}'", flush=True)
            return


def timed(case: Case, device: torch.device, gb_per_s: float) -> list[dict[str, Any]]:
    """Check and time the kernels of a case, and return its lines."""
    batch = case.batch
    scores = {n: q * k for n, (q, k) in enumerate(zip(batch.q_lens, batch.k_lens, strict=True))}
    few = sorted(scores, key=scores.__getitem__)
    asked = [*few[:2], *[n for n in few if batch.q_lens[n] > 1][:1]]
    candidates: dict[str, Run] = {}
    for name in (*case.runs, *case.rivals):
        try:
            run = case.runs[name] if name in case.runs else case.rivals[name](batch)
            output = run()
            output = output[0] if isinstance(output, tuple) else output
            output = output.flatten(0, 1) if output.ndim == 4 else output
            has_reference = "fp8" not in name and not batch.is_fp8
            found = batch.error(output, asked) if has_reference else 0.0
        except Exception as failure:
            print(f"{case.name}, {name}: {type(failure).__name__}: {failure}", flush=True)
            continue
        if not found < 0.006:
            print(f"{case.name}, {name}: WRONG, error {found:.4f}", flush=True)
            continue
        candidates[name] = run
    samples = measure(candidates, device, cache=CACHE, rounds=ROUNDS, max_seconds=0.5)
    times = {name: statistics.median(each.ms) for name, each in samples.items() if each.ms}
    lines = []
    for name, ms in times.items():
        line: dict[str, Any] = {"case": case.name, "kernel": name, "ms": ms}
        if name in case.bytes_of:
            line["floor / time"] = case.bytes_of[name] / gb_per_s / 1e6 / ms
        if case.ratio is not None and name == case.ratio[1] and case.ratio[0] in times:
            line |= {"ratio": times[case.ratio[0]] / ms, "of": f"{case.ratio[0]} / {name}"}
        lines.append(line)
    return lines


def _said(line: dict[str, Any]) -> str:
    share = f"{line['floor / time']:7.1%}" if "floor / time" in line else " " * 7
    ratio = f"{line['of']} = {line['ratio']:.3f}" if "ratio" in line else ""
    return f"{line['case']:42} {line['kernel']:13} {line['ms']:8.4f} ms {share}  {ratio}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=GROUPS, default=list(GROUPS))
    parser.add_argument("--out", type=Path, default=results.DIRECTORY / "engine_kernels.csv")
    arguments = parser.parse_args()
    device = gpu()
    machine = measured_on(device)
    wrong = check(device)
    roof = measure_roof(torch.bfloat16, device)
    if roof is None:
        raise SystemExit("no memory is left to measure copies with")
    print(f"{machine['machine.device']}: copies {roof.gb_per_s / 1000:.2f} TB/s\n", flush=True)
    lines: list[dict[str, Any]] = []
    for group in arguments.only:
        for case in cases_in_time(group):
            found = timed(case, device, roof.gb_per_s)
            lines += [line | machine for line in found]
            results.write_lines(lines, COLUMNS, arguments.out)
            print(*map(_said, found), sep="\n", flush=True)
            del case
            torch.cuda.empty_cache()
    print(f"{wrong} paths wrong")


if __name__ == "__main__":
    with torch.no_grad():
        main()
