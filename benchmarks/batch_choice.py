"""Error of computing the time of 1,000 batches of an engine from at most 40 of them.

    python -m benchmarks.batch_choice [--seconds 480] [--kernel NAME] [--trace NAME]   needs a GPU
    python -m benchmarks.batch_choice --kernel roofline                                needs none

A toy engine (`benchmarks.traffic`) makes the batches. `record`'s own sampler chooses those whose
tensors a recording would keep. They and the others, in random order until the time is over, are
timed with a kernel over pages. The table compares the sum of the times with the sum computed from
the chosen batches alone, for each phase and for all, by several models:

- `nearest`: the time of the nearest chosen batch;
- `keys`, `pairs`: that time, times the ratio of the batches' numbers of keys, or of pairs;
- `work`: that time, times the ratio of their work (`replay.plan.batch_matching`), as in `replay`;
- `linear`: a least-squares fit of the chosen batches' times to a constant, keys and pairs.

With `--kernel roofline`, times are computed instead of measured (an H100's operations or bytes,
whichever take longer, for each sequence), which shows the error of the choice alone.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from benchmarks.gpu import gpu
from benchmarks.traffic import TRACES, batches
from capture.call.attention_call import AttentionCall
from capture.call.attention_variant import AttentionVariant
from capture.call.batch import Batch, BatchSize
from capture.recording.sampling import OfferedCall, make_sampler
from replay.kernels.registry import find
from replay.plan.batch_matching import weights

KERNELS = ("fa3-kvcache", "fa4-varlen", "fa2-varlen")
"""Kernels for packed queries over pages; the first that runs the batches is the default."""
ROOFLINE = "roofline"
MOST, SAMPLES, CHUNK = 40, 7, 8192
"""Numbers of chosen batches, of samples of a time, and of tokens of the engine's largest step."""
CACHE_BYTES, WAIT_CYCLES = 2**28, 2_000_000


Q_HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE = 32, 8, 128, 16
"""Sizes of a layer."""


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

    def __init__(self, everyone: Sequence[Batch], device: torch.device) -> None:
        self._device = device
        self._pages = max(sum(_page_counts(batch)) for batch in everyone)
        shape = (2, self._pages, PAGE_SIZE, KV_HEADS, HEAD_DIM)
        self._cache = torch.randn(shape, dtype=torch.bfloat16, device=device).transpose(2, 3)

    def call(self, batch: Batch) -> AttentionCall:
        """Return the call of a batch, whose pages lie anywhere in the cache."""
        device, counts = self._device, _page_counts(batch)
        shuffled = torch.randperm(self._pages, dtype=torch.int32)[: sum(counts)].split(counts)
        table = torch.nn.utils.rnn.pad_sequence(list(shuffled), batch_first=True)
        queries = torch.randn(
            sum(batch.queries), Q_HEADS, HEAD_DIM, dtype=torch.bfloat16, device=device
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


def _page_counts(batch: Batch) -> list[int]:
    return [-(-length // PAGE_SIZE) for length in batch.keys]


def roofline_ms(batch: Batch) -> float:
    """Return the time of a batch at 600·10¹² operations and 3·10¹² bytes per second."""
    per_pair, per_key = (4 * HEAD_DIM * heads for heads in (Q_HEADS, KV_HEADS))
    alone = (Batch((query,), (keys,)).size for query, keys in zip(*batch, strict=True))
    seconds = (max(per_pair * one.pairs / 600e12, per_key * one.keys / 3e12) for one in alone)
    return 0.005 + 1000 * sum(seconds)


def core(kernel: str, call: AttentionCall) -> Callable[[], object]:
    """Return the part of a kernel that is timed.

    Raises:
        SystemExit: the kernel cannot run the call.
    """
    found = find(kernel)
    if reason := _reason(kernel, call):
        raise SystemExit(f"{kernel}: {reason}")
    if found.prepare is not None:
        return found.prepare(call)
    return lambda: found.attention(**call.arguments())


def _reason(name: str, call: AttentionCall) -> str | None:
    kernel = find(name)
    return kernel.unavailable(call.device) or kernel.refuses(call)


def measured(run: Callable[[], object], buffer: Tensor) -> float:
    """Return the median time of a call in ms, after other reads."""
    run()
    samples: list[float] = []
    for _ in range(SAMPLES):
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
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=480, help="time limit (default: 480)")
    parser.add_argument(
        "--kernel",
        help=f"kernel to time, or {ROOFLINE} (default: the first of {KERNELS} that runs)",
    )
    parser.add_argument("--trace", choices=TRACES, default="conversation")
    parser.add_argument("--rate", type=float, default=2.0, help="times the trace's (default: 2)")
    parser.add_argument("--batches", type=int, default=1000, help="(default: 1000)")
    arguments = parser.parse_args()
    end = time.monotonic() + arguments.seconds
    kernel = arguments.kernel
    device = torch.device("cpu") if kernel == ROOFLINE else gpu()
    made = batches(arguments.trace, arguments.batches, CHUNK, arguments.rate)
    phases, everyone = [phase for phase, _ in made], [batch for _, batch in made]
    figures = [batch.size for batch in everyone]
    chosen = choose(phases, figures, MOST)
    if kernel != ROOFLINE:
        layer = Layer(everyone, device)
        buffer = torch.zeros(CACHE_BYTES // 4, device=device)
    if kernel is None:
        call = layer.call(everyone[chosen[0]])
        able = (name for name in KERNELS if not _reason(name, call))
        kernel = next(able, None) or parser.error(f"none of {', '.join(KERNELS)} runs here")
    draw, others = random.Random(0), [at for at in range(len(made)) if at not in set(chosen)]
    draw.shuffle(others)

    def timed_now(at: int) -> float:
        if kernel == ROOFLINE:
            return roofline_ms(everyone[at])
        return measured(core(kernel, layer.call(everyone[at])), buffer)

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
    name = "no GPU" if kernel == ROOFLINE else torch.cuda.get_device_name(device)
    print(
        f"{name}, torch {torch.__version__}, {kernel}, {arguments.trace} × {arguments.rate:g}, "
        f"{Q_HEADS}/{KV_HEADS} heads × {HEAD_DIM}"
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
