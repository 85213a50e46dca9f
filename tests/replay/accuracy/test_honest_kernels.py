"""Torch's exact kernels pass on hard inputs for any seed; an output with one changed row fails.

Every run draws new seeds, so that even a rare false alarm occurs eventually. A failure states its
seed.
"""

import math
import random
import time
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from capture.call.attention_call import AttentionCall
from replay.accuracy.verdict import Expected, judge
from replay.kernels.registry import find

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
VALUES = ("normal", "heavy tails", "one mean", "cancelling", "tiny", "huge", "sharp", "flat")


def fresh_seeds(count: int) -> range:
    first = time.time_ns() // 1000 % 2**40
    return range(first, first + count)


def hard_call(seed: int) -> AttentionCall:
    """Return a call with few keys and rows, cancelling sums, subnormals, or rows without keys."""
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator)

    dtype, values = draw.choice(DTYPES), draw.choice(VALUES)
    kv_heads = draw.choice((1, 2))
    heads = kv_heads * draw.choice((1, 1, 3))
    q_len, kv_len = draw.choice((1, 2, 7, 64)), draw.choice((1, 2, 3, 5, 17, 33, 128, 300))
    head_dim = draw.choice((1, 8, 32, 64, 128))
    v_head_dim = draw.choice((head_dim, head_dim, 1, 2, 16))
    query = normal(1, heads, q_len, head_dim) * {"sharp": 6.0, "flat": 1e-3}.get(values, 1.0)
    key, value = normal(1, kv_heads, kv_len, head_dim), normal(1, kv_heads, kv_len, v_head_dim)
    if values == "heavy tails":
        value *= torch.exp(2 * normal(1, kv_heads, kv_len, 1))
    elif values == "one mean":
        value = 0.1 * value + 3 * normal(1, kv_heads, 1, v_head_dim)
    elif values == "cancelling":
        value[:, :, 1::2] = -1.003 * value[:, :, 0 : kv_len - kv_len % 2 : 2]
        query *= 0.01
    value *= {"tiny": 1e-6, "huge": 3e3}.get(values, 1.0)
    attn_mask, mask = None, draw.choice(("none", "causal", "bool", "float"))
    if mask in ("bool", "float"):
        attn_mask = torch.rand(1, 1, q_len, kv_len, generator=generator) < draw.choice((0.02, 0.8))
        attn_mask[..., 0, :] = False
        if mask == "float":
            attn_mask = torch.zeros(attn_mask.shape).masked_fill_(~attn_mask, -math.inf).to(dtype)
    return AttentionCall(
        query.to(dtype),
        key.to(dtype),
        value.to(dtype),
        attn_mask=attn_mask,
        is_causal=mask == "causal",
        enable_gqa=heads != kv_heads,
    )


def small_call(seed: int) -> AttentionCall:
    """Return the call of `replay --random -hq 2 -sq 64 -sk 1024 -d 128` for this seed."""
    generator = torch.Generator().manual_seed(seed)
    dtype = DTYPES[seed % len(DTYPES)]
    sizes = ((1, 2, 64, 128), (1, 2, 1024, 128), (1, 2, 1024, 128))
    return AttentionCall(*(torch.randn(size, generator=generator).to(dtype) for size in sizes))


def outputs(call: AttentionCall, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Yield PyTorch's outputs; for every second seed, also one from scaled scores, as in models."""
    same_width = call.query.shape[3] == call.value.shape[3]
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH)[not same_width :]:
        with sdpa_kernel(backend):
            yield backend.name, F.scaled_dot_product_attention(**call.arguments())
    if seed % 2:
        return
    if call.attn_mask is None and seed // 10 % 2:
        yield "the example of docs/your-own-kernel.md", example(**call.arguments())
    else:
        yield "eager", find("eager").attention(**call.arguments())


def example(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    is_causal: bool = False,
    enable_gqa: bool = False,
    **_: object,
) -> Tensor:
    scale = query.shape[-1] ** -0.5
    key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    value = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
    scores = query @ key.mT * scale
    if is_causal:
        scores += torch.full_like(scores[0, 0], float("-inf")).triu(1)
    return scores.softmax(-1) @ value


def check(seeds: range) -> None:
    for seed in seeds:
        for make in (hard_call, small_call) if seed % 10 == 0 else (hard_call,):
            call = make(seed)
            expected = Expected.of(call)
            for name, output in outputs(call, seed):
                verdict = judge(output, expected, "exact")
                assert verdict.passed, f"{make.__name__}({seed}), {name}: {verdict.sentence}"


@pytest.mark.parametrize("calls", [150, pytest.param(1_050, marks=pytest.mark.slow)])
def test_honest_kernels_pass(calls: int) -> None:
    check(fresh_seeds(calls))


@pytest.mark.parametrize("dtype_number", range(len(DTYPES)))
def test_changed_row_fails(dtype_number: int) -> None:
    for seed in fresh_seeds(10):
        call = small_call(3 * seed + dtype_number)
        expected = Expected.of(call)
        head, query = seed % 2, seed % 63
        for name, output in outputs(call, seed):
            neighbour, scaled = output.clone(), output.clone()
            neighbour[0, head, query] = output[0, head, query + 1]
            scaled[0, head, query] *= 0.9
            for broken in (neighbour, scaled):
                verdict = judge(broken, expected, "exact")
                assert not verdict.passed, f"{seed}, {name}: {verdict.sentence}"
                assert f"worst row (batch 0, head {head}, query {query})" in verdict.sentence
                assert (verdict.where.head, verdict.where.queries) == ((0, head), (query, query))
