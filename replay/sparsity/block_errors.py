"""Errors of block-sparse attention for each head and policy, from one exact pass over a call.

The pass splits the softmax over all keys into blocks. For each query, block b has the mass
m_b = Σ p_j and the part u_b = Σ p_j v_j over its keys j. A policy that keeps the blocks K gives the
output Σ u_b / Σ m_b over K, so the sums of one pass give the outputs of all policies. With the
dropped mass m, the error is

    o_kept - o = m · (o_kept - o_dropped)

A policy may choose blocks by means, which hide a single key with a large weight. The error is that
of the output, so it shows such a key.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from attention_kernels.sparse.block_policy import BlockPolicy, kept_blocks, visible_blocks
from capture.call.attention_call import AttentionCall

MOST_TILES = 64
"""Number of tiles of a head that are examined, evenly spaced; the choice of blocks is that of all
tiles."""

MOST_WEIGHTS = 2**27
"""Number of softmax weights that are held at a time, in float32."""


class Sums(NamedTuple):
    """Sums over a head's output elements, from which the errors of any set of heads follow."""

    product: float
    """Sum of output · exact output."""
    output: float
    """Sum of output²."""
    exact: float
    """Sum of (exact output)²."""
    size: float
    """Sum of |exact output|."""
    squared: float
    """Sum of error²."""
    absolute: float
    """Sum of |error|."""


@dataclass(frozen=True)
class HeadErrors:
    """Errors and densities of the query heads of one call with each policy."""

    sums: list[list[Sums]]
    """Sums by policy and head, over the examined tiles of all batch elements."""
    density: list[list[float]]
    """Share of the visible blocks that are kept, by policy and head."""
    mass: list[list[float]]
    """Mean softmax mass of the kept blocks over the queries, by policy and head."""
    elements: int
    """Number of output elements of a head in the sums."""


def head_errors(
    call: AttentionCall, policies: Sequence[BlockPolicy], rows: int, keys: int
) -> HeadErrors:
    """Compare attention to the blocks that each policy keeps with attention to all keys.

    Args:
        call: a call without a mask and without features beyond SDPA.
        rows: number of queries in a tile.
        keys: number of keys in a block.

    Raises:
        ValueError: a policy cannot choose for the call, or a tensor has NaN or infinite elements.
    """
    if not all(bool(torch.isfinite(each).all()) for each in (call.query, call.key, call.value)):
        raise ValueError("has NaN or infinite inputs: see `replay doctor`")
    shape = call.shape
    choose = partial(kept_blocks, is_causal=call.is_causal, scale=call.scale)
    kept = torch.stack(
        [choose(call.query, call.key, policy, rows, keys) for policy in policies]
    )  # (policies, B, Hq, tiles, blocks)
    seen, _ = visible_blocks(
        shape.q_len, shape.kv_len, rows, keys, call.is_causal, call.query.device
    )
    density = kept.sum(dim=(1, 3, 4)) / (shape.batch * seen.sum())
    totals = torch.zeros(
        len(policies), shape.q_heads, len(Sums._fields) + 1, dtype=torch.float64, device=call.device
    )
    for batch in range(shape.batch):
        for head in range(shape.q_heads):
            choice = kept[:, batch, head].float()
            for tiles, weights, value in _weights(call, batch, head, rows, keys):
                totals[:, head] += _compared(
                    weights, value, choice[:, tiles], _is_query(tiles, rows, shape.q_len)
                )
    *sums, mass = totals.unbind(dim=2)
    tiles = _examined(kept.shape[3], call.device)
    queries = shape.batch * int(_is_query(tiles, rows, shape.q_len).sum())
    return HeadErrors(
        [[Sums(*each) for each in policy] for policy in torch.stack(sums, dim=2).tolist()],
        density.tolist(),
        (mass / queries).tolist(),
        queries * shape.v_head_dim,
    )


def _examined(tiles: int, device: torch.device) -> Tensor:
    """Return the indices of the tiles that are examined."""
    number = min(tiles, MOST_TILES)
    return (torch.arange(number, device=device) * 2 + 1) * tiles // (2 * number)


def _is_query(tiles: Tensor, rows: int, q_len: int) -> Tensor:
    """Return which rows of some tiles exist, bool (tiles, rows); the last tile may be shorter."""
    return tiles[:, None] * rows + torch.arange(rows, device=tiles.device) < q_len


def _weights(
    call: AttentionCall, batch: int, head: int, rows: int, keys: int
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield tiles, their softmax weights (tiles, rows, blocks, keys), and the values (blocks, keys,
    Dv) of a head."""
    shape = call.shape
    kv_head = head // (shape.q_heads // shape.kv_heads)
    scale = shape.head_dim**-0.5 if call.scale is None else call.scale
    blocks = -(-shape.kv_len // keys)
    missing = blocks * keys - shape.kv_len
    query = call.query[batch, head].float() * scale
    key, value = (
        pad(each[batch, kv_head].float(), (0, 0, 0, missing)) for each in (call.key, call.value)
    )
    tiles = _examined(-(-shape.q_len // rows), call.device)
    place = torch.arange(blocks * keys, device=call.device)
    for part in tiles.split(max(1, MOST_WEIGHTS // (rows * blocks * keys))):
        queries = part[:, None] * rows + torch.arange(rows, device=call.device)
        scores = query[queries.clamp(max=shape.q_len - 1)] @ key.T
        if missing:
            scores[..., shape.kv_len :] = -torch.inf
        if call.is_causal:
            scores.masked_fill_(place > queries[..., None], -torch.inf)
        yield (
            part,
            scores.softmax(dim=-1).unflatten(-1, (blocks, keys)),
            value.unflatten(0, (blocks, keys)),
        )


def _compared(weights: Tensor, value: Tensor, kept: Tensor, is_query: Tensor) -> Tensor:
    """Return `Sums` and the kept mass of each policy, (policies, 7) in float64.

    Args:
        weights: (tiles, rows, blocks, keys).
        value: (blocks, keys, Dv).
        kept: (policies, tiles, blocks), 1 for kept blocks and 0 for others.
        is_query: bool (tiles, rows).
    """
    tiles, rows, *_ = weights.shape
    parts = weights.flatten(0, 1).transpose(0, 1) @ value  # (blocks, tiles · rows, Dv)
    exact = parts.sum(dim=0).unflatten(0, (tiles, rows))
    by_tile = parts.unflatten(1, (tiles, rows)).flatten(2).transpose(0, 1)
    sums = (kept.transpose(0, 1) @ by_tile).unflatten(2, (rows, -1)).transpose(0, 1)
    mass = (weights.sum(dim=3) @ kept.permute(1, 2, 0)).permute(2, 0, 1)  # (policies, tiles, rows)
    # A mass of 0 underflowed, and its parts with it; such an output is 0.
    output = torch.where(is_query[..., None], sums / mass.clamp(min=1e-30)[..., None], 0.0)
    exact = torch.where(is_query[..., None], exact, 0.0)
    error = output - exact
    figures = (output * exact, output**2, exact**2, exact.abs(), error**2, error.abs())
    found = [each.sum(dim=(-3, -2, -1), dtype=torch.float64) for each in figures]
    found.append((mass * is_query).sum(dim=(1, 2), dtype=torch.float64))
    return torch.stack([each.expand(len(kept)) for each in found], dim=1)
