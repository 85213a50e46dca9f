"""Pairs of outputs that are equal in every bit if calls are invariant, on a GPU or on the CPU."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from attention_kernels.decode.contiguous_decode import contiguous_decode
from attention_kernels.decode.paged_decode import paged_decode
from attention_kernels.decode.paging import page
from attention_kernels.operators import attention
from attention_kernels.options import PLAIN, AttentionOptions
from attention_kernels.portable.varlen import KeyRanges, packed_prefill, padded_prefill
from tests.attention_kernels.calls import DEVICE, lengths, normal, offsets

Sizes = tuple[int, int, int]
"""(Hq, Hkv, D)."""
Pairs = Iterator[tuple[str, Tensor, Tensor]]
"""Names of calls, and two tensors each: outputs, with logarithms appended at prefill."""


def inputs(
    sizes: Sizes, batch: int, q_len: int, kv_len: int, dtype: torch.dtype = torch.float16
) -> tuple[Tensor, Tensor, Tensor]:
    q_heads, kv_heads, head_dim = sizes
    return (
        normal(batch, q_heads, q_len, head_dim, dtype=dtype),
        normal(batch, kv_heads, kv_len, head_dim, seed=1, dtype=dtype),
        normal(batch, kv_heads, kv_len, head_dim, seed=2, dtype=dtype),
    )


def whole(output: Tensor, lse: Tensor) -> Tensor:
    """Return an output with its logarithms in another column. NaN would hide differences."""
    assert not output.isnan().any()
    return torch.cat([output.float(), lse[..., None]], dim=-1)


def prefilled(
    sizes: Sizes,
    ends: list[int],
    invariant: bool,
    dtype: torch.dtype = torch.float16,
    v_dim: int | None = None,
    **fields: Any,
) -> Pairs:
    """Yield chunks that end at `ends`, a sequence alone, packed and padded on the left, beside the
    same rows in a batch of sequences of length `ends[-1]`."""
    length = ends[-1]
    query, key, value = inputs(sizes, 2, length, length, dtype)
    value = value[..., :v_dim]
    # The first keys have larger scores, so that some rows change their reference and others do not.
    key *= torch.linspace(5, 1, length, device=DEVICE)[:, None].to(dtype)
    options = AttentionOptions(bottom_right=True, invariant=invariant, **fields)
    sinks = normal(sizes[0], seed=7)
    common: dict[str, Any] = {"options": options, "sinks": sinks, "return_lse": True}
    common["is_causal"] = True
    together = whole(*attention(query, key, value, enable_gqa=True, **common))
    plain = {**common, "options": replace(options, invariant=False)}
    assert_near(together, whole(*attention(query, key, value, enable_gqa=True, **plain)))
    for begin, end in pairwise([0, *ends]):
        chunk = query[:1, :, begin:end], key[:1, :, :end], value[:1, :, :end]
        found = whole(*attention(*chunk, enable_gqa=True, **common))
        yield f"queries {begin} to {end}", found, together[:1, :, begin:end]
    found = whole(*attention(query[1:], key[1:], value[1:], enable_gqa=True, **common))
    yield "alone", found, together[1:]
    common["options"] = replace(options, decode=False)
    for begin, end in ((length - 1, length), (ends[0] + 3, ends[0] + 10)):
        chunk = query[:1, :, begin:end], key[:1, :, :end], value[:1, :, :end]
        found = whole(*attention(*chunk, enable_gqa=True, **common))
        yield f"decoded queries {begin} to {end}", found, together[:1, :, begin:end]
    common["options"] = options

    last = ends[-2]
    rows = [
        torch.cat([each[0, :, : ends[0]], each[1, :, first:]], dim=1).transpose(0, 1)
        for each, first in ((query, last), (key, 0), (value, 0))
    ]
    at = offsets(ends[0], length - last), offsets(ends[0], length)
    output, lse = packed_prefill(rows[0], rows[1], rows[2], *at, length, **common)
    found = whole(output.transpose(0, 1), lse)
    yield "packed", found[:, : ends[0]], together[0, :, : ends[0]]
    yield "packed behind another", found[:, ends[0] :], together[1, :, last:]

    moved = [each[:1].roll(37, dims=2) for each in (query, key, value)]
    ranges = KeyRanges(lengths(37), lengths(length - 37))
    found = whole(*padded_prefill(moved[0], moved[1], moved[2], ranges, **common))
    yield "padded on the left", found[:, :, 37:], together[:1, :, :-37]


def masked(
    sizes: Sizes,
    length: int,
    begin: int,
    invariant: bool,
    dtype: torch.dtype = torch.bool,
    left: int | None = None,
) -> Pairs:
    """Yield queries from `begin` on under a mask, beside a call that has all queries, another
    sequence, and, if there is no causal window, masked keys at the end."""
    query, key, value = inputs(sizes, 2, length, length + 70)
    mask = torch.rand(2, 1, length, length + 70, device=DEVICE) > 0.3
    mask[..., begin:, 64:128] = True  # whole blocks for the chunk alone
    mask[..., length:] = False
    if dtype != torch.bool:
        mask = torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, float("-inf"))
    options = PLAIN if left is None else AttentionOptions(bottom_right=True, window=(left, 0))
    common: dict[str, Any] = {"enable_gqa": True, "invariant": invariant, "options": options}
    common["return_lse"] = True
    together = whole(*attention(query, key, value, mask, **common))
    plain = {**common, "invariant": False}
    assert_near(together, whole(*attention(query, key, value, mask, **plain)))
    end = length if left is None else length + 70
    own = query[1:, :, begin:], key[1:, :, :end], value[1:, :, :end]
    own_mask = mask[1:, :, begin:, :end].contiguous()
    yield "masked", whole(*attention(*own, own_mask, **common)), together[1:, :, begin:]


def decoded(sizes: Sizes, used: list[int], q_len: int, left: int | None, invariant: bool) -> Pairs:
    """Yield sequences of these lengths alone and together: given lengths, pages and masks."""
    query, key, value = inputs(sizes, len(used), q_len, max(used))
    options = AttentionOptions(bottom_right=True, window=(left, 0), invariant=invariant)
    counts = lengths(*used)
    together = contiguous_decode(query, key, value, seqused_k=counts, options=options)
    pages = page(key, value, 16, lengths=counts)
    paged = paged_decode(query, *pages, options=options)
    plain = paged_decode(query, *pages, options=replace(options, invariant=False))
    assert_near(torch.stack([together, paged]), torch.stack([plain, plain]))
    mask = (torch.arange(max(used), device=DEVICE) < counts[:, None])[:, None, None]
    common: dict[str, Any] = {"enable_gqa": True, "invariant": invariant}
    with_masks = attention(query, key, value, mask, **common)
    for n, length in enumerate(used):
        own = slice(n, n + 1)
        alone = query[own], key[own, :, :length], value[own, :, :length]
        yield f"length {length}", attention(*alone, enable_gqa=True, options=options), together[own]
        pages = page(alone[1], alone[2], 16)
        yield f"pages {length}", paged_decode(query[own], *pages, options=options), paged[own]
        found = attention(*alone, mask[own, ..., :length], **common)
        yield f"mask {length}", found, with_masks[own]


def assert_near(output: Tensor, plain: Tensor) -> None:
    """Compare with a kernel that other tests judge."""
    torch.testing.assert_close(output.float(), plain.float(), rtol=0, atol=3e-2)


def different(pairs: Pairs) -> list[str]:
    """Return the names of the pairs that differ in a bit."""
    return [name for name, found, expected in pairs if not torch.equal(found, expected)]
