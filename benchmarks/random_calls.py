"""Judges our Triton kernels on random calls, and in blocks of calls (two minutes on a GPU).

    python -m benchmarks.random_calls [--calls 2000] [--seconds 300] [--processes 12] [--seed 0]
    python -m benchmarks.random_calls --kernel triton-fa3     # families of some kernels
    python -m benchmarks.random_calls --kernel triton-attention triton-attention-varlen
    python -m benchmarks.random_calls --only 37        # one family again, and what failed in it
    TRITON_INTERPRET=1 python -m benchmarks.random_calls --device cpu --seconds 900 --processes 2

Head dimensions, types, masks, windows, lengths, strides and values are drawn from a seed. A family
is a set of calls that share one compiled program. Compiling takes seconds, so calls come in
families of 40, which are shared out among processes. The gradients of kernels with a backward pass,
those of the third command, are judged too. Writes `benchmarks/results/random_calls.csv`,
a line for each kernel; on a CPU, where calls are small and Gluon kernels are omitted, only if
`--out` names a file. Exits 1 if an output is wrong, and 2 if time ran out first.
"""

from __future__ import annotations

import argparse
import itertools
import math
import multiprocessing
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks import results
from benchmarks.gpu import MACHINE, gpu, measured_on
from capture.call.attention_call import AttentionCall
from capture.call.attention_variant import AttentionVariant
from replay.accuracy.gradient_verdict import judge_gradients
from replay.accuracy.thresholds import Thresholds
from replay.accuracy.verdict import Expected, judge
from replay.isolation.block_inputs import BlockInputs
from replay.isolation.judge import LocalJudge
from replay.isolation.output_form import output_shape
from replay.kernels.registry import Kernel, find
from replay.workloads.distributions import DISTRIBUTIONS
from replay.workloads.random_calls import Spec

CALLS_OF_A_FAMILY, CALLS_OF_A_BLOCK = 40, 4
COLUMNS = ("kernel", "calls", "wrong", *MACHINE)

PLAIN = ("plain", "causal")
HIDING = ("padding", "random", "mask by head")
MASKED = (*HIDING, "float mask")
VARIANTS = ("bottom right", "window", "window both ways", "soft cap", "sinks")
PACKED = ("packed", "packed, bottom right", "packed, window")
FORMS: dict[str, tuple[str, ...]] = {
    "triton-fa2": (*PLAIN, *MASKED, *VARIANTS),
    "triton-masked": MASKED,
    "triton-fa3": (*PLAIN, *MASKED, *VARIANTS),
    "triton-attention": (*PLAIN, *MASKED, *VARIANTS),
    "triton-attention-varlen": (
        *("padding", "key lengths", *PACKED, "packed, soft cap", "packed, sinks"),
    ),
    "triton-sage": (*PLAIN, *HIDING, *VARIANTS, "key lengths", *PACKED),
    "triton-fp8": (*PLAIN, *HIDING, *VARIANTS, "key lengths", *PACKED),
    "triton-sage-fp8": (*PLAIN, *HIDING, *VARIANTS, "key lengths", *PACKED),
    "triton-varlen": ("padding", "key lengths", *PACKED),
    "triton-decode": (*PLAIN, *MASKED, *VARIANTS, "key lengths"),
    "triton-decode-int8": (*PLAIN, *MASKED, *VARIANTS, "key lengths"),
    "triton-decode-fp8": (*PLAIN, *MASKED, *VARIANTS, "key lengths"),
    "triton-paged-decode-int8": (*PLAIN, *VARIANTS, "key lengths"),
    "triton-paged-decode-fp8": (*PLAIN, *VARIANTS, "key lengths"),
    "triton-paged-decode": ("plain", "padding", "key lengths", "window"),
    "triton-sparse-decode": ("plain", "padding"),
    "triton-paged-sparse-decode": ("plain", "padding"),
    "triton-block-sparse": PLAIN,
}
"""Forms of calls that each kernel must support, by kernel name."""
DECODE = tuple(name for name in FORMS if "decode" in name)
HEAD_DIMS = (64, 64, 128, 128, 32, 40, 72, 80, 96, 112, 192, 256)


class Sizes(NamedTuple):
    """Maximum sizes of a call."""

    scores: int
    queries: int
    keys: int
    cached: int
    """Number of keys of a decode step."""


SIZES = {"cuda": Sizes(2**24, 1200, 2500, 20000), "cpu": Sizes(2**12, 100, 300, 2000)}
"""Sizes for which float64 attention takes milliseconds on a GPU, and the interpreter less than a
second."""


@dataclass(frozen=True)
class Family:
    """Calls that share one or a few compiled programs."""

    number: int
    kernel: str
    form: str
    head_dim: int
    v_head_dim: int
    dtype: torch.dtype
    layout: str


class Failure(NamedTuple):
    family: Family
    call: int
    sentence: str


def family(seed: int, number: int) -> Family:
    """Draw a family; kernels take turns."""
    rng = random.Random(f"{seed} {number}")
    kernel = list(FORMS)[number % len(FORMS)]
    head_dim = rng.choice((*HEAD_DIMS, rng.randint(1, 256)))
    v_head_dim = head_dim if rng.random() < 0.8 else rng.choice(HEAD_DIMS)
    if kernel == "triton-fa3":
        head_dim, v_head_dim = (-(-dim // 8) * 8 for dim in (head_dim, v_head_dim))
    return Family(
        number,
        kernel,
        rng.choice(FORMS[kernel]),
        head_dim,
        v_head_dim,
        rng.choice((torch.float16, torch.bfloat16)),
        rng.choice(list(LAYOUTS)),
    )


def families_of(seed: int, calls: int, kernels: Collection[str]) -> list[Family]:
    """Return the first families with this many calls, for some kernels."""
    drawn = (family(seed, number) for number in itertools.count())
    chosen = (each for each in drawn if each.kernel in kernels)
    return list(itertools.islice(chosen, -(-calls // CALLS_OF_A_FAMILY)))


def _apart(tensor: Tensor) -> Tensor:
    return tensor.mT.contiguous().mT


def _odd(tensor: Tensor) -> Tensor:
    """Return a copy at an odd address, with rows an odd number of elements apart."""
    batch, heads, length, dim = tensor.shape
    room = tensor.new_full((batch, heads, length, dim + 1 + dim % 2), math.nan)
    return room[..., 1 : dim + 1].copy_(tensor)


def _padded(tensor: Tensor) -> Tensor:
    """Return a part of a longer cache with wider rows."""
    batch, heads, length, dim = tensor.shape
    room = tensor.new_full((batch, heads, length + 13, dim + 8), math.nan)
    return room[:, :, :length, :dim].copy_(tensor)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda tensor: tensor,
    "model's": lambda tensor: tensor.transpose(1, 2).contiguous().transpose(1, 2),
    "elements apart": _apart,
    "odd": _odd,
    "part of a cache": _padded,
    "one for all": lambda tensor: tensor[:1].expand(tensor.shape[0], -1, -1, -1),
}
"""Memory layouts of the tensors; the last has a batch stride of 0."""


def draw(drawn: Family, seed: int, number: int, device: torch.device) -> AttentionCall:
    """Draw a call of a family."""
    rng = random.Random(f"{seed} {drawn.number} {number}")
    generator = torch.Generator(device).manual_seed(rng.getrandbits(63))
    most = SIZES[device.type]
    is_decode, is_packed = drawn.kernel in DECODE, drawn.form.startswith("packed")
    batch = 1 if is_packed else rng.choice((1, 1, 2, 3))
    kv_heads, group = rng.choice((1, 1, 2, 3)), rng.choice((1, 1, 2, 4, 7))
    q_len = rng.choice((1, 1, 2, 5, 16)) if is_decode else _length(rng, most.queries)
    kv_len = _length(rng, most.cached if is_decode else most.keys)
    kv_len = min(kv_len, max(1, most.scores // (batch * kv_heads * group * q_len)))
    if drawn.form in ("bottom right", "window", "window both ways") or is_packed:
        kv_len = max(kv_len, q_len)  # every query must see a key
    spec = Spec(
        batch,
        kv_heads * group,
        kv_heads,
        q_len,
        kv_len,
        drawn.head_dim,
        drawn.v_head_dim,
        is_causal=drawn.form == "causal",
        # Triton's interpreter rounds to bfloat16 towards zero.
        dtype=torch.float16 if device.type == "cpu" else drawn.dtype,
        distribution=rng.choice(("normal", *DISTRIBUTIONS)),
        mask=drawn.form if drawn.form in ("padding", "random") else "none",
        scale=rng.choice((None, None, None, 0.05, 0.3)),
    )
    call = spec.call(device, generator)
    lay_out = LAYOUTS[drawn.layout]
    call = call.with_tensors(
        {name: lay_out(getattr(call, name)) for name in ("query", "key", "value")}
    )
    return _with_form(call, drawn.form, rng, generator)


def _length(rng: random.Random, most: int) -> int:
    """Draw a length: short and long lengths, multiples of blocks and their neighbours are
    frequent."""
    length = int(math.exp(rng.uniform(0, math.log(most))))
    if rng.random() < 0.3:
        length = max(1, -(-length // 64) * 64 + rng.choice((-1, 0, 0, 1)))
    return length


def _with_form(
    call: AttentionCall, form: str, rng: random.Random, generator: torch.Generator
) -> AttentionCall:
    device, shape = call.device, call.shape
    window = AttentionVariant(window=(rng.randint(0, shape.kv_len), None), bottom_right=True)
    if form.startswith("packed"):
        call = _packed(call, rng)
    if form in ("float mask", "mask by head"):
        heads = shape.q_heads if form == "mask by head" else 1
        size = (1, heads, shape.q_len, shape.kv_len)
        values = torch.randn(size, generator=generator, device=device)
        mask = values.to(call.dtype) if form == "float mask" else values > -0.5
        if form == "mask by head":
            mask[..., 0] = True
        return call.with_tensors({"attn_mask": mask})
    if form in ("bottom right", "packed, bottom right"):
        return replace(call, is_causal=True, variant=AttentionVariant(bottom_right=True))
    if form in ("window", "packed, window"):
        return replace(call, is_causal=True, variant=window)
    if form == "window both ways":
        sides = (rng.randint(0, shape.kv_len), rng.randint(0, shape.kv_len))
        return replace(call, variant=AttentionVariant(window=sides, bottom_right=True))
    if form.endswith("soft cap"):
        return replace(call, variant=AttentionVariant(softcap=rng.choice((0.5, 5.0, 50.0))))
    if form.endswith("sinks"):
        sinks = torch.randn(shape.q_heads, generator=generator, device=device)
        return replace(call, sinks=3 * sinks)
    if form == "key lengths":
        lengths = [rng.randint(1, shape.kv_len) for _ in range(shape.batch)]
        return replace(call, seqused_k=torch.tensor(lengths, dtype=torch.int32, device=device))
    return call


def _packed(call: AttentionCall, rng: random.Random) -> AttentionCall:
    """Return several packed sequences, some empty, none with fewer keys than queries."""
    q_len, kv_len = call.shape.q_len, call.shape.kv_len
    cuts = sorted(rng.randint(0, q_len) for _ in range(rng.randint(0, 4)))
    more = sorted(rng.randint(0, kv_len - q_len) for _ in cuts)
    offsets_q = [0, *cuts, q_len]
    offsets_k = [0, *(cut + extra for cut, extra in zip(cuts, more, strict=True)), kv_len]
    q, k = (
        torch.tensor(offsets, dtype=torch.int32, device=call.device)
        for offsets in (offsets_q, offsets_k)
    )
    return replace(call, cu_seqlens_q=q, cu_seqlens_k=k)


def check(drawn: Family, seed: int, calls: int, device: torch.device) -> list[Failure]:
    """Run a family's calls and judge them."""
    kernel = find(drawn.kernel)
    failures = []
    for number in range(calls):
        try:
            call = draw(drawn, seed, number, device)
            if reason := kernel.refuses(call):
                failures.append(Failure(drawn, number, f"refused: {reason}"))
                continue
            chosen = None if kernel.chosen is None else kernel.chosen(call)
            output = kernel.attention(**call.arguments())
            expected = Expected.of(call, chosen)
            is_quantised = kernel.accuracy_class == "quantised"
            thresholds = thresholds_for(expected) if is_quantised else Thresholds()
            verdict = judge(output, expected, kernel.accuracy_class, thresholds)
            wrong = wrong_in_a_block(kernel, call, chosen) if verdict.passed else verdict.sentence
            if kernel.differentiable and not wrong:
                wrong = wrong_gradients(kernel, call)
            if wrong:
                failures.append(Failure(drawn, number, f"{call.shape}: {wrong}"))
        except Exception as error:
            failures.append(Failure(drawn, number, f"{type(error).__name__}: {error}"))
    return failures


def wrong_in_a_block(kernel: Kernel, call: AttentionCall, chosen: Tensor | None) -> str:
    """Return what a replay would find wrong in a block of calls; empty if it finds nothing.

    A kernel that is inaccurate on the call itself gets no block.
    """
    name, accuracy_class = kernel.name, kernel.accuracy_class
    of_call = LocalJudge(call)
    output = kernel.attention(**call.arguments())
    if of_call.judge(name, accuracy_class, output, chosen).finding.status != "ok":
        return ""
    inputs, all_chosen = BlockInputs(call), []
    outputs: list[Tensor] = []
    inputs.draw(0, CALLS_OF_A_BLOCK)
    for number in range(CALLS_OF_A_BLOCK):
        inputs.apply(number, outputs[-1] if outputs else None)
        output = kernel.attention(**call.arguments())
        outputs.append(torch.empty(output_shape(call), dtype=call.dtype, device=call.device))
        outputs[-1].copy_(output)
        if kernel.chosen is not None:
            all_chosen.append((number, kernel.chosen(call)))
    inputs.restore()
    return of_call.judge_block(name, accuracy_class, 0, outputs, 0, all_chosen or None)


def wrong_gradients(kernel: Kernel, call: AttentionCall) -> str:
    """Return which gradients are wrong, for a random gradient of the output; empty for none."""
    grad_output = torch.randn(output_shape(call), device=call.device).to(call.dtype)
    verdict = judge_gradients(replace(call, grad_output=grad_output), kernel.attention)
    return "" if verdict.passed else f"gradients: {verdict}"


def thresholds_for(expected: Expected) -> Thresholds:
    """Return the usual thresholds, relaxed where plain 8-bit attention is also inaccurate.

    A quantised kernel may have twice the error of plain 8-bit attention. An error of r times the
    signal leaves a cosine of at least √(1 - r²).
    """
    usual = Thresholds()
    if (noise := expected.quantised) is None:
        return usual
    of_plain = float(noise.whole[0].nan_to_num().max())
    relative_l1 = max(usual.quantised.maximum_relative_l1, 2 * of_plain)
    cosine = min(usual.quantised.minimum_cosine, max(0.0, 1 - relative_l1**2) ** 0.5)
    return replace(
        usual,
        quantised=replace(usual.quantised, maximum_relative_l1=relative_l1, minimum_cosine=cosine),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=300.0, help="time limit in seconds")
    parser.add_argument("--processes", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--kernel", nargs="+", choices=FORMS, default=FORMS, help="kernels to test (default: all)"
    )
    parser.add_argument("--only", type=int, metavar="FAMILY", help="run one family in this process")
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"))
    parser.add_argument(
        "--out",
        type=Path,
        help="result file (default on a GPU: benchmarks/results/random_calls.csv)",
    )
    arguments = parser.parse_args()
    out = arguments.out
    if arguments.device.type == "cuda":
        gpu()
    if out is None and arguments.device.type == "cuda":
        out = results.DIRECTORY / "random_calls.csv"
    seed, device, began = arguments.seed, arguments.device, time.monotonic()
    if arguments.only is not None:
        drawn = family(seed, arguments.only)
        print(drawn)
        return report(check(drawn, seed, CALLS_OF_A_FAMILY, device))
    families = [
        each
        for each in families_of(seed, arguments.calls, arguments.kernel)
        if find(each.kernel).unavailable(device) is None
    ]
    machine = measured_on(device)
    made: Counter[str] = Counter()
    failures: list[Failure] = []
    with ProcessPoolExecutor(
        arguments.processes, mp_context=multiprocessing.get_context("spawn")
    ) as pool:
        jobs = {
            pool.submit(check, each, seed, CALLS_OF_A_FAMILY, device): each for each in families
        }
        for job in as_completed(jobs):
            if job.cancelled():
                continue
            made[jobs[job].kernel] += CALLS_OF_A_FAMILY
            found = job.result()
            report(found)
            failures += found
            if out is not None:
                write(made, failures, machine, out)
            if time.monotonic() - began > arguments.seconds:
                pool.shutdown(wait=False, cancel_futures=True)
    asked = len(families) * CALLS_OF_A_FAMILY
    print(f"{made.total()} of {asked} calls, {len(failures)} wrong, in", end=" ")
    print(f"{time.monotonic() - began:.0f} s")
    return 1 if failures else 2 if made.total() < asked else 0


def write(made: Counter[str], failures: list[Failure], machine: dict[str, Any], path: Path) -> None:
    """Write the results so far, because the machine may be lost before the end."""
    wrong = Counter(failure.family.kernel for failure in failures)
    lines = [
        {"kernel": name, "calls": made[name], "wrong": wrong[name], **machine} for name in FORMS
    ]
    results.write_lines(lines, COLUMNS, path)


def report(failures: list[Failure]) -> int:
    """Print the failures; return 1 if there are any."""
    for drawn, number, sentence in failures:
        print(f"family {drawn.number}, call {number} ({drawn.kernel}, {drawn.form},", end=" ")
        print(f"head_dim {drawn.head_dim}/{drawn.v_head_dim}, {drawn.layout}): {sentence}")
    return int(bool(failures))


if __name__ == "__main__":
    with torch.no_grad():
        sys.exit(main())
