"""Error of computing the time of 1,000 batches of an engine from at most 40 of them.

    python -m benchmarks.batch_choice [--device cuda] [--seconds 480] [--kernel NAME] [--trace NAME]

A toy engine (`benchmarks.traffic`) makes the batches. `record`'s own sampler chooses those whose
tensors a recording would keep. They and the others, in random order until the time is over, are
timed with a kernel over pages. The table compares the sum of the times with the sum computed from
the chosen batches alone, for each phase and for all, by several models:

- `nearest`: the time of the nearest chosen batch;
- `keys`, `pairs`: that time, times the ratio of the batches' numbers of keys, or of pairs;
- `work`: that time, times the ratio of their work (`replay.plan.batch_matching`), as in `replay`;
- `linear`: a least-squares fit of the chosen batches' times to a constant, keys and pairs.

On a CPU, the kernel is SDPA on one sequence after the other, with small heads, and the run is a
check of the program, not a result. With `--kernel roofline`, times are computed instead of measured
(an H100's operations or bytes, whichever take longer, for each sequence), which shows the error of
the choice alone.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.traffic import TRACES, batches
from capture.call.attention_call import AttentionCall
from capture.call.attention_variant import AttentionVariant
from capture.call.batch import Batch, BatchSize
from capture.recording.sampling import OfferedCall, make_sampler
from replay.kernels.registry import find
from replay.plan.batch_matching import weights

KERNELS = ("fa3-kvcache", "fa4-varlen", "fa2-varlen")
"""Kernels for packed queries over pages; the first that runs the batches is the default."""
BY_SEQUENCE, ROOFLINE = "sdpa-by-sequence", "roofline"
MOST, SAMPLES, CHUNK = 40, 7, 8192
"""Numbers of chosen batches, of samples of a time, and of tokens of the engine's largest step."""
LONG_MS = 20.0
"""Time limit for the samples of one call on a CPU."""
CACHE_BYTES, WAIT_CYCLES = 2**28, 2_000_000


@dataclass(frozen=True)
class Sizes:
    """Sizes of a layer."""

    q_heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype


SIZES = {
    "cuda": Sizes(32, 8, 128, 16, torch.bfloat16),
    "cpu": Sizes(4, 2, 32, 16, torch.float32),
}


def choose(phases: Sequence[str], sizes: Sequence[BatchSize], most: int) -> list[int]:
    """Return the indices of the batches that a recording of one layer keeps."""
    sampler = make_sampler("spread", most, None)
    for step, (phase, size) in enumerate(zip(phases, sizes, strict=True)):
        place = sampler.place((phase,), "layer")
        if sampler.wants(place, step, size):
            sampler.offer(OfferedCall(step, place, step, nbytes=1, size=size))
    return sorted(sampler.calls)


class Layer:
    """Cache of one layer, large enough for each of some batches, and their calls."""

    def __init__(self, sizes: Sizes, everyone: Sequence[Batch], device: torch.device) -> None:
        self._sizes, self._device = sizes, device
        self._pages = max(sum(self._counts(batch)) for batch in everyone)
        shape = (2, self._pages, sizes.page_size, sizes.kv_heads, sizes.head_dim)
        self._cache = torch.randn(shape, dtype=sizes.dtype, device=device).transpose(2, 3)

    def _counts(self, batch: Batch) -> list[int]:
        return [-(-length // self._sizes.page_size) for length in batch.keys]

    def call(self, batch: Batch) -> AttentionCall:
        """Return the call of a batch, whose pages lie anywhere in the cache."""
        sizes, device, counts = self._sizes, self._device, self._counts(batch)
        shuffled = torch.randperm(self._pages, dtype=torch.int32)[: sum(counts)].split(counts)
        table = torch.nn.utils.rnn.pad_sequence(list(shuffled), batch_first=True)
        queries = torch.randn(
            sum(batch.queries), sizes.q_heads, sizes.head_dim, dtype=sizes.dtype, device=device
        )
        starts = torch.tensor([0, *batch.queries]).cumsum(0)
        return AttentionCall(
            queries.transpose(0, 1)[None],
            key=self._cache[0],
            value=self._cache[1],
            is_causal=True,
            enable_gqa=True,
            cu_seqlens_q=starts.to(device, torch.int32),
            seqused_k=torch.tensor(batch.keys, dtype=torch.int32, device=device),
            page_table=table.to(device),
            variant=AttentionVariant(
                bottom_right=True, max_seqlen_q=max(batch.queries), max_seqlen_k=max(batch.keys)
            ),
        )


def by_sequence(call: AttentionCall) -> Callable[[], object]:
    """Return SDPA on each sequence; each reads its pages and its causal mask ends at its end."""
    assert call.cu_seqlens_q is not None
    assert call.page_table is not None
    assert call.seqused_k is not None
    starts, lengths = call.cu_seqlens_q.tolist(), call.seqused_k.tolist()
    table, page_size = call.page_table.long(), call.key.shape[2]

    def run() -> list[Tensor]:
        outputs = []
        for at, length in enumerate(lengths):
            pages = table[at, : -(-length // page_size)]
            key, value = (
                pool[pages].transpose(0, 1).flatten(1, 2)[None, :, :length]
                for pool in (call.key, call.value)
            )
            query = call.query[:, :, starts[at] : starts[at + 1]]
            rows = torch.arange(length - query.shape[2], length)[:, None]
            mask = None if query.shape[2] == 1 else rows >= torch.arange(length)
            outputs.append(scaled_dot_product_attention(query, key, value, mask, enable_gqa=True))
        return outputs

    return run


def roofline_ms(batch: Batch, sizes: Sizes) -> float:
    """Return the time of a batch at 600·10¹² operations and 3·10¹² bytes per second."""
    per_pair, per_key = (4 * sizes.head_dim * heads for heads in (sizes.q_heads, sizes.kv_heads))
    alone = (Batch((query,), (keys,)).size for query, keys in zip(*batch, strict=True))
    seconds = (max(per_pair * one.pairs / 600e12, per_key * one.keys / 3e12) for one in alone)
    return 0.005 + 1000 * sum(seconds)


def core(kernel: str, call: AttentionCall) -> Callable[[], object]:
    """Return the part of a kernel that is timed.

    Raises:
        SystemExit: the kernel cannot run the call.
    """
    if kernel == BY_SEQUENCE:
        return by_sequence(call)
    found = find(kernel)
    if reason := found.unavailable(call.device) or found.refuses(call):
        raise SystemExit(f"{kernel}: {reason}")
    if found.prepare is not None:
        return found.prepare(call)
    return lambda: found.attention(**call.arguments())


def measured(run: Callable[[], object], device: torch.device, buffer: Tensor) -> float:
    """Return the median time of a call in ms: of a GPU after other reads, of a CPU's thread."""
    run()
    samples: list[float] = []
    while len(samples) < SAMPLES and (device.type == "cuda" or sum(samples) < LONG_MS):
        if device.type == "cpu":
            begin = time.thread_time()
            run()
            samples.append(1000 * (time.thread_time() - begin))
            continue
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(WAIT_CYCLES)  # until the host has enqueued the sample
        buffer.sum()
        first.record()
        run()
        last.record()
        last.synchronize()
        samples.append(first.elapsed_time(last))
    return statistics.median(samples)


Model = Callable[[list[BatchSize], list[BatchSize], list[float]], float]
"""Function of batches, chosen batches and the latter's times to the batches' total time."""


def nearest_times(factor: Callable[[BatchSize], float]) -> Model:
    """Return the model of the nearest chosen batch's time, times the ratio of a factor."""

    def total(sizes: list[BatchSize], chosen: list[BatchSize], times: list[float]) -> float:
        found = 0.0
        for size in sizes:
            at = min(range(len(chosen)), key=lambda index: size.distance(chosen[index]))
            found += times[at] * factor(size) / factor(chosen[at])
        return found

    return total


def linear(sizes: list[BatchSize], chosen: list[BatchSize], times: list[float]) -> float:
    """Return the total of a fit to a constant, keys and pairs, with equal relative errors."""
    known, rows = (
        torch.tensor([[1.0, size.keys, size.pairs] for size in each], dtype=torch.float64)
        for each in (chosen, sizes)
    )
    weight = 1 / torch.tensor(times, dtype=torch.float64)[:, None]
    fitted = torch.linalg.lstsq(known * weight, torch.ones_like(weight), driver="gelsd").solution
    return float((rows @ fitted).sum())


def as_in_replay(sizes: list[BatchSize], chosen: list[BatchSize], times: list[float]) -> float:
    """Return the total by the factors with which `replay plan` weighs the chosen batches."""
    counts = dict.fromkeys(sizes, 0.0)
    for size in sizes:
        counts[size] += 1
    return math.fsum(
        factor * each for factor, each in zip(weights(counts, chosen), times, strict=True)
    )


MODELS: dict[str, Model] = {
    "nearest": nearest_times(lambda size: 1.0),
    "keys": nearest_times(lambda size: size.keys),
    "pairs": nearest_times(lambda size: size.pairs),
    "work": as_in_replay,
    "linear": linear,
}


def main() -> None:
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default=default, help="cpu or cuda (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=480, help="time limit (default: 480)")
    parser.add_argument("--kernel", help=f"kernel to time (default: the first of {KERNELS})")
    parser.add_argument("--trace", choices=TRACES, default="conversation")
    parser.add_argument("--rate", type=float, default=2.0, help="times the trace's (default: 2)")
    parser.add_argument("--batches", type=int, default=1000, help="(default: 1000)")
    arguments = parser.parse_args()
    end = time.monotonic() + arguments.seconds
    device = torch.device(arguments.device)
    torch.set_num_threads(1)
    sizes = SIZES["cuda" if arguments.kernel == ROOFLINE else device.type]
    made = batches(arguments.trace, arguments.batches, CHUNK, arguments.rate)
    phases, everyone = [phase for phase, _ in made], [batch for _, batch in made]
    figures = [batch.size for batch in everyone]
    chosen = choose(phases, figures, MOST)
    kernel = arguments.kernel or BY_SEQUENCE
    if kernel != ROOFLINE:
        layer = Layer(sizes, everyone, device)
    if arguments.kernel is None and device.type == "cuda":
        call = layer.call(everyone[chosen[0]])
        able = (name for name in KERNELS if not _reason(name, call))
        kernel = next(able, None) or parser.error(f"none of {', '.join(KERNELS)} runs here")
    buffer = torch.zeros(CACHE_BYTES // 4 if device.type == "cuda" else 1, device=device)
    draw, others = random.Random(0), [at for at in range(len(made)) if at not in set(chosen)]
    draw.shuffle(others)

    def timed_now(at: int) -> float:
        if kernel == ROOFLINE:
            return roofline_ms(everyone[at], sizes)
        return measured(core(kernel, layer.call(everyone[at])), device, buffer)

    # The chosen batches are timed before and after the others, because the machine's speed changes.
    begin = time.monotonic()
    first = {at: timed_now(at) for at in draw.sample(chosen, len(chosen))}
    end -= time.monotonic() - begin
    times = {
        at: timed_now(at) for at in itertools.takewhile(lambda _: time.monotonic() < end, others)
    }
    last = {at: timed_now(at) for at in draw.sample(chosen, len(chosen))}
    times |= {at: (first[at] + last[at]) / 2 for at in chosen}
    drift = sum(last.values()) / sum(first.values()) - 1
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(
        f"{name}, torch {torch.__version__}, {kernel}, {arguments.trace} × {arguments.rate:g}, "
        f"{sizes.q_heads}/{sizes.kv_heads} heads × {sizes.head_dim}"
    )
    print(f"The chosen batches took {drift:+.1%} at the end. Error of the computed total:")
    print(f"{'phase':8} {'batches':>8} {'timed':>6} {'chosen':>7} {'ms':>10}", end="")
    print("".join(f"{model:>9}" for model in MODELS))
    totals = dict.fromkeys(MODELS, 0.0)
    for phase in dict.fromkeys(phases):
        timed = [at for at in times if phases[at] == phase]
        known = [at for at in chosen if phases[at] == phase]
        errors = {}
        for model, total in MODELS.items():
            computed = total(
                [figures[at] for at in timed],
                [figures[at] for at in known],
                [times[at] for at in known],
            )
            totals[model] += computed
            errors[model] = computed / sum(times[at] for at in timed) - 1
        _print_line(phase, phases.count(phase), timed, known, times, errors)
    errors = {model: total / sum(times.values()) - 1 for model, total in totals.items()}
    _print_line("all", len(made), list(times), chosen, times, errors)


def _reason(name: str, call: AttentionCall) -> str | None:
    kernel = find(name)
    return kernel.unavailable(call.device) or kernel.refuses(call)


def _print_line(
    phase: str,
    number: int,
    timed: Sequence[int],
    chosen: Sequence[int],
    times: dict[int, float],
    errors: dict[str, float],
) -> None:
    total = sum(times[at] for at in timed)
    print(f"{phase:8} {number:8} {len(timed):6} {len(chosen):7} {total:10.2f}", end="")
    print("".join(f"{error:+9.1%}" for error in errors.values()))


if __name__ == "__main__":
    main()
