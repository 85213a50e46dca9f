"""Policies that choose blocks of keys for each head and tile of queries, as formulas in PyTorch.

A tile is a run of `rows` queries, and a block a run of `keys` keys; the last of each may be
shorter. A policy keeps whole blocks for whole tiles. `kept_blocks` needs neither Triton nor a GPU.
`block_choice.py` computes the same choice with kernels.

Pooled scores estimate the softmax weight of a block from means (as in SpargeAttn, Zhang et al.
2025, arXiv:2502.18137): for the mean q̄ of a tile's queries and the mean k̄ of a block's n keys,

    p = softmax over blocks of (scale · q̄·k̄ + log n)

Means are those of at most `SAMPLES` evenly spaced rows, so that less is read.

A window of space and time assumes that the sequence is [text tokens] + frames × rows × columns. A
video token keeps the text and the tokens in a box around it (as in Sliding Tile Attention, Zhang et
al. 2025, arXiv:2502.04507); a text token keeps everything.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from attention_kernels.launch.shape_checks import check_shapes, check_types

Share = float | tuple[float, ...]
"""One number for all query heads, or one for each."""
Triple = tuple[int, int, int]
"""Frames, rows and columns."""
SAMPLES = 32
"""Largest number of rows in a mean."""
MOST_AT_ONCE = 2**26
"""Elements that `_within_reach` holds at a time."""


@dataclass(frozen=True)
class BlockPolicy:
    """Rule that chooses blocks of keys: exactly one of `keep`, `mass` and `window`.

    Every tile keeps at least one block. In a causal call, a tile chooses among the blocks that its
    queries see, and always keeps the blocks that the diagonal cuts.

    Raises:
        TypeError: a share is not a number.
        ValueError: no rule or several, or a value that would leave a query without a block.
    """

    keep: Share | None = None
    """Share of the blocks with the highest pooled scores, more than 0 and at most 1 (a dense head).
    The number of blocks is rounded, and at least 1."""
    mass: Share | None = None
    """Sum of the pooled weights p to reach with as few blocks as possible, more than 0 and at most
    1 (a dense head)."""
    window: Triple | None = None
    """Reach of the window: numbers of frames, rows and columns on each side of a token."""
    grid: Triple | None = None
    """Numbers of frames, rows and columns of the video, which is the end of the sequence."""

    def __post_init__(self) -> None:
        rules = {"keep": self.keep, "mass": self.mass, "window": self.window}
        given = [name for name, rule in rules.items() if rule is not None]
        if len(given) != 1:
            found = " and ".join(given) or "none of them"
            raise ValueError(f"give exactly one of keep, mass and window, got {found}")
        if self.window is not None and self.grid is None:
            raise ValueError("window needs a grid: add the numbers of frames, rows and columns")
        if self.window is None and self.grid is not None:
            raise ValueError(f"grid belongs to window: leave it out, or replace {given[0]} by one")
        for name in ("keep", "mass"):
            for share in _numbers(name, rules[name]):
                if not 0 < share <= 1:
                    raise ValueError(
                        f"{name} must be more than 0 and at most 1, got {share:g}: use a share "
                        "such as 0.5"
                    )
        for name, triple, least in (("window", self.window, 0), ("grid", self.grid, 1)):
            if triple is not None and not (
                isinstance(triple, tuple)
                and len(triple) == 3
                and all(isinstance(number, int) and number >= least for number in triple)
            ):
                raise ValueError(
                    f"{name} must be a tuple of three integers of at least {least} (frames, rows "
                    f"and columns), got {triple!r}"
                )

    @property
    def is_by_mass(self) -> bool:
        return self.mass is not None

    def limits(self, heads: int) -> tuple[float, ...]:
        """Return `keep` or `mass` of each query head; infinity for a mass of 1, because rounded
        weights may reach 1 before the last block.

        Raises:
            ValueError: the policy has another number of heads.
        """
        numbers = _numbers("keep", self.keep) or _numbers("mass", self.mass)
        if len(numbers) not in (1, heads):
            raise ValueError(
                f"{len(numbers)} shares for {heads} query heads: give one, or one for each head"
            )
        if self.is_by_mass:
            numbers = tuple(math.inf if number == 1 else number for number in numbers)
        return numbers * heads if len(numbers) == 1 else numbers

    def refuses(self, heads: int, q_len: int, k_len: int, *, is_causal: bool) -> str | None:
        """Return the reason why the policy cannot choose for a call, or None."""
        if self.window is None or self.grid is None:
            try:
                self.limits(heads)
            except ValueError as error:
                return str(error)
            return None
        if is_causal:
            return "a window of space and time takes no causal calls"
        video = math.prod(self.grid)
        if q_len != k_len or video > k_len:
            sizes = "x".join(map(str, self.grid))
            return (
                f"a grid of {sizes} needs as many queries as keys, and at least {video}: this "
                f"call has {q_len} queries and {k_len} keys"
            )
        return None


def _numbers(name: str, share: Share | None) -> tuple[float, ...]:
    shares = () if share is None else share if isinstance(share, tuple) else (share,)
    if not all(isinstance(each, int | float) for each in shares):
        raise TypeError(f"{name} must be a number, or a tuple of one for each head, got {share!r}")
    return tuple(map(float, shares))


def check_choice(
    query: Tensor, key: Tensor, value: Tensor, policy: BlockPolicy, *, is_causal: bool
) -> None:
    """Check the arguments of a choice of blocks.

    Raises:
        TypeError: an argument has another type.
        ValueError: the shapes do not fit together, or the policy cannot choose for such a call.
    """
    check_types({"query": query, "key": key, "value": value})
    if not isinstance(policy, BlockPolicy):
        raise TypeError(f"policy must be a BlockPolicy(...), got {type(policy).__name__}")
    check_shapes(query.shape, key.shape, value.shape)
    sizes = query.shape[1], query.shape[2], key.shape[2]
    if reason := policy.refuses(*sizes, is_causal=is_causal):
        raise ValueError(reason)


def kept_blocks(
    query: Tensor,
    key: Tensor,
    policy: BlockPolicy,
    rows: int,
    keys: int,
    *,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Return the blocks that a policy keeps, bool (B, Hq, ⌈Sq / rows⌉, ⌈Sk / keys⌉).

    Args:
        query: (B, Hq, Sq, D), of any floating-point type.
        key: (B, Hkv, Sk, D), Hkv a divisor of Hq.
        rows: number of queries in a tile.
        keys: number of keys in a block. `block_sparse.block_sizes` returns the kernel's sizes.
        is_causal: query i sees keys 0 to i, as in SDPA.
        scale: factor of the scores; None for 1/√D.

    Raises:
        TypeError, ValueError: as for `check_choice`.
    """
    check_choice(query, key, key, policy, is_causal=is_causal)
    batch, heads, q_len, head_dim = query.shape
    k_len = key.shape[2]
    if policy.window is not None:
        kept = window_blocks(policy, q_len, k_len, rows, keys, query.device)
        return kept.expand(batch, heads, *kept.shape[2:])
    scale = head_dim**-0.5 if scale is None else scale
    group = heads // key.shape[1]
    scores = means(query, rows) @ means(key, keys).repeat_interleave(group, dim=1).mT
    scores = scores * scale + _lengths(k_len, keys, key.device).log()
    seen, is_cut = visible_blocks(q_len, k_len, rows, keys, is_causal, key.device)
    scores = scores.masked_fill(~seen, -math.inf)
    weights = scores.softmax(dim=-1)
    # Blocks on the diagonal come first, so that no query is left without a key.
    ranking = scores.masked_fill(is_cut, math.inf)
    order = ranking.argsort(dim=-1, descending=True, stable=True)
    limit = torch.tensor(policy.limits(heads), device=key.device)[:, None, None]
    if not policy.is_by_mass:
        weights = torch.ones_like(weights)
        limit = (limit * seen.sum(dim=-1, keepdim=True) + 0.5).floor().clamp(min=1)
    ordered = weights.gather(-1, order)
    before = ordered.cumsum(dim=-1) - ordered
    kept = torch.zeros_like(scores, dtype=torch.bool)
    kept.scatter_(-1, order, before < limit)
    return (kept | is_cut) & seen


def means(tensor: Tensor, length: int) -> Tensor:
    """Return the means of runs of `length` rows of a tensor (B, H, S, D), as (B, H, runs, D)
    float32. A mean is that of every n-th row of a run, n = ⌈length / SAMPLES⌉.
    """
    step = -(-length // SAMPLES)
    runs, samples = -(-tensor.shape[2] // length), -(-length // step)
    sampled = torch.nn.functional.pad(tensor, (0, 0, 0, runs * length - tensor.shape[2]))
    sampled = sampled.unflatten(2, (runs, length))[:, :, :, ::step].float()
    is_row = torch.arange(samples, device=tensor.device) * step < _lengths(
        tensor.shape[2], length, tensor.device
    ).unsqueeze(1)
    return sampled.sum(dim=3) / is_row.sum(dim=1, keepdim=True)


def _lengths(total: int, length: int, device: torch.device) -> Tensor:
    """Return the number of rows in each run, (runs,) float32."""
    first = torch.arange(0, total, length, device=device)
    return (total - first).clamp(max=length).float()


def visible_blocks(
    q_len: int, k_len: int, rows: int, keys: int, is_causal: bool, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return the blocks that some query of a tile sees, and the blocks that the diagonal hides in
    part from a query, both bool (tiles, blocks)."""
    first_query = torch.arange(0, q_len, rows, device=device)[:, None]
    first_key = torch.arange(0, k_len, keys, device=device)
    if not is_causal:
        seen = torch.ones(len(first_query), len(first_key), dtype=torch.bool, device=device)
        return seen, torch.zeros_like(seen)
    seen = first_key < first_query + rows
    last_key = (first_key + keys).clamp(max=k_len) - 1
    return seen, seen & (last_key > first_query)


@functools.lru_cache(maxsize=64)
def window_blocks(
    policy: BlockPolicy, q_len: int, k_len: int, rows: int, keys: int, device: torch.device
) -> Tensor:
    """Return the blocks that a window keeps, bool (1, 1, tiles, blocks).

    A block is kept if one of its keys is in the window of one of the tile's queries.
    """
    assert policy.window is not None
    assert policy.grid is not None
    text = k_len - math.prod(policy.grid)
    tiles, blocks = -(-q_len // rows), -(-k_len // keys)
    kept = torch.zeros(tiles, blocks, dtype=torch.bool, device=device)
    step = max(1, MOST_AT_ONCE // k_len)
    for first in range(0, tiles, step):
        of_tile = torch.arange(first, min(first + step, tiles), device=device)[:, None]
        is_query = torch.arange(q_len, device=device) // rows == of_tile
        is_key = torch.ones_like(is_query)
        is_key[:, text:] = _within_reach(is_query[:, text:], policy.window, policy.grid)
        padded = torch.nn.functional.pad(is_key, (0, blocks * keys - k_len))
        kept[of_tile[:, 0]] = padded.unflatten(1, (blocks, keys)).any(dim=2)
    kept[: -(-text // rows)] = True
    return kept[None, None]


def _within_reach(tokens: Tensor, window: Triple, grid: Triple) -> Tensor:
    """Return the tokens within reach of any of the given ones, bool (tiles, frames · rows ·
    columns)."""
    volume = tokens.unflatten(1, grid).float()[:, None]
    for axis, reach in enumerate(window):
        size, padding = [1, 1, 1], [0, 0, 0]
        # A reach beyond the grid is that of the whole axis.
        padding[axis] = min(reach, grid[axis] - 1)
        size[axis] = 2 * padding[axis] + 1
        volume = torch.nn.functional.max_pool3d(volume, size, stride=1, padding=padding)
    return volume[:, 0].flatten(1) > 0
