"""The reference of gradients: the backward of attention, in high precision and bounded memory.

With probabilities P and the gradient dO that reached the output, each query i and key j has

    dPᵢⱼ = dOᵢ·Vⱼ    δᵢ = Σⱼ Pᵢⱼ·dPᵢⱼ    dSᵢⱼ = Pᵢⱼ·(dPᵢⱼ - δᵢ)
    dV = Pᵀ·dO       dQ = scale · (dS·C)·K       dK = scale · (dS·C)ᵀ·Q

where C = 1 - tanh² is the slope of the soft cap, or 1. The mask's gradient is dS, summed over the
dimensions that the mask broadcasts. A sink has a probability but no value, so that its gradient is
-Σᵢ exp(sink - LSEᵢ)·δᵢ. The heads of a group add up in dK and dV. A query that sees no key has
dQ = 0, and a key that no query sees has dK = dV = 0.

P comes in blocks of rows from `replay.accuracy.reference.weights`, so that masks, windows, packed
sequences and the other options have the meaning that they have for outputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from capture.call.attention_call import AttentionCall
from capture.call.gradients import DIFFERENTIATED
from replay.accuracy.reference import WeightBlock, product, weights


@dataclass(frozen=True)
class Gradient:
    """Gradient of one tensor, and its rounding noise."""

    values: Tensor
    """The tensor's shape, with leading dimensions of 1 up to four; sinks are (1, Hq, 1, 1)."""
    noise: Tensor
    """One number a row, in float64: norm of its errors, in units of half the call's machine
    epsilon; 0 unless `values` are the reference (`_Total._add_noise`)."""


def gradients(
    call: AttentionCall,
    grad_output: Tensor,
    dtype: torch.dtype = torch.float64,
    block_elements: int | None = None,
    *,
    scale_scores: bool = False,
) -> dict[str, Gradient]:
    """Compute the gradients of a call's query, key and value, and of its float mask and sinks.

    In float64, this is the reference. In the call's own dtype, it is eager attention: P, dP, dS and
    every head's dK and dV are rounded, and sums are in float32.

    Args:
        grad_output: (B, Hq, Sq, Dv).
        block_elements, scale_scores: see `replay.accuracy.reference.weights`.

    Raises:
        ValueError: the call has pages, or its query heads are not a multiple of its key heads.
    """
    if call.page_table is not None:
        raise ValueError("gradients of a call with a page table cannot be computed")
    total = _Total(call, grad_output, dtype)
    for block in weights(call, dtype, block_elements, scale_scores=scale_scores, with_slopes=True):
        total.add(block)
    return total.end()


class _Total:
    """Sums over the blocks of a call."""

    def __init__(self, call: AttentionCall, grad_output: Tensor, dtype: torch.dtype) -> None:
        self.call, self.grad_output, self.dtype = call, grad_output, dtype
        self.sums = torch.float64 if dtype == torch.float64 else torch.float32
        shape = call.shape
        self.group = shape.q_heads // max(1, shape.kv_heads)
        self.is_low = call.dtype.itemsize < 4
        limits = torch.finfo(call.dtype)
        self.least = limits.tiny**2
        """Square of the largest rounding error of a number below the smallest normal number, in
        units of half the machine epsilon."""
        sizes = {name: getattr(call, name).shape for name in DIFFERENTIATED}
        mask = call.attn_mask
        if mask is not None and mask.is_floating_point():
            sizes["attn_mask"] = mask[(None,) * (4 - mask.ndim)].shape
        if call.sinks is not None:
            sizes["sinks"] = torch.Size((1, shape.q_heads, 1, 1))
        self.values = {name: self._zeros(size, self.sums) for name, size in sizes.items()}
        self.squares = {name: self._zeros(size[:3]) for name, size in sizes.items()}
        """Squares of the errors of a row's terms, in units of half the machine epsilon."""
        self.place: tuple[int, slice] | None = None
        self.of_heads: dict[str, Tensor] = {}
        """dK and dV of each query head at `place`."""

    def add(self, block: WeightBlock) -> None:
        """Add a block of rows of some heads."""
        if self.place != (block.batch, block.heads):
            self._add_heads()
            self.place = block.batch, block.heads
            count = block.heads.stop - block.heads.start
            for name in ("key", "value"):
                size = getattr(self.call, name).shape[2:]
                self.of_heads[name] = self._zeros((count, *size), self.sums)
        batch, heads, rows, keys = block.batch, block.heads, block.rows, block.keys
        query = self.call.query[batch, heads, rows].to(self.dtype)
        upper = self.grad_output[batch, heads, rows].to(self.dtype)
        key = self.call.key[batch, self._kv_heads(heads), keys].to(self.dtype)
        scale = self.call.softmax_scale
        found = block.weights
        slopes = product(upper, block.value.mT)
        delta = (found.to(self.sums) * slopes.to(self.sums)).sum(-1, keepdim=True)
        of_mask = (found.to(self.sums) * (slopes.to(self.sums) - delta)).to(self.dtype)
        of_scores = of_mask if block.slope is None else of_mask * block.slope
        self.values["query"][batch, heads, rows] = scale * product(of_scores, key).to(self.sums)
        of_key = scale * product(of_scores.mT, query).to(self.sums)
        self.of_heads["key"][:, keys] += of_key
        self.of_heads["value"][:, keys] += product(found.mT, upper).to(self.sums)
        if "attn_mask" in self.values:
            self._add_to_mask(self.values, block, of_mask)
        if "sinks" in self.values:
            weight = 1 - found.to(self.sums).sum(-1, keepdim=True)
            self.values["sinks"][0, heads, 0, 0] -= (weight * delta).sum((1, 2))
        if self.dtype == torch.float64:
            self._add_noise(block, query, key, upper, slopes, delta)

    def _add_noise(
        self,
        block: WeightBlock,
        query: Tensor,
        key: Tensor,
        upper: Tensor,
        slopes: Tensor,
        delta: Tensor,
    ) -> None:
        batch, heads, rows = block.batch, block.heads, block.rows
        found, scale = block.weights, self.call.softmax_scale
        output = product(found, block.value)
        size = slopes.abs()
        of_delta = (upper * output).square().sum(-1, keepdim=True)
        of_delta += (found * slopes).square().sum(-1, keepdim=True)
        if not self.is_low:  # a sum in float32 has the error of its terms' size
            lengths = torch.linalg.vector_norm(upper, dim=-1, keepdim=True)
            size = lengths * torch.linalg.vector_norm(block.value, dim=-1)[..., None, :]
            of_delta = (found * size).sum(-1, keepdim=True).square()
        # Kernels round dS before or after they multiply it by the scale.
        of_least = self.least * max(1.0, 1 / abs(scale) if scale else 1.0) ** 2
        own = (found * (size + delta.abs())).square() + of_least * (found > 0)
        common = found.square() * of_delta
        if block.slope is not None:
            own, common = own * block.slope.square(), common * block.slope.square()
        of_scores = own + common
        key_lengths = key.square().sum(-1, keepdim=True)
        coherent = product(found if block.slope is None else found * block.slope, key)
        self.squares["query"][batch, heads, rows] = scale**2 * (
            product(own, key_lengths).squeeze(-1) + coherent.square().sum(-1) * of_delta.squeeze(-1)
        )
        query_lengths = query.square().sum(-1, keepdim=True)
        self._add_to_keys("key", block, scale**2 * product(of_scores.mT, query_lengths))
        upper_lengths = upper.square().sum(-1, keepdim=True)
        of_weights = found.square() + self.least * (found > 0)
        self._add_to_keys("value", block, product(of_weights.mT, upper_lengths))
        if "attn_mask" in self.squares:
            self._add_to_mask(self.squares, block, own + common)
        if "sinks" in self.squares:
            weight = 1 - found.sum(-1, keepdim=True)
            squares = weight.square() * (delta.square() + of_delta)
            self.squares["sinks"][0, heads, 0] += squares.sum((1, 2))

    def end(self) -> dict[str, Gradient]:
        """Return the gradients, rounded to the dtype."""
        self._add_heads()
        found = {}
        for name, values in self.values.items():
            rounded = values.to(self.dtype)
            lengths = rounded.double().square().sum(-1)
            found[name] = Gradient(rounded, (self.squares[name] + lengths).sqrt_())
        return found

    def _add_heads(self) -> None:
        """Add the gradients of the query heads at `place` to those of their key head."""
        if self.place is None:
            return
        batch, heads = self.place
        for name, of_heads in self.of_heads.items():
            rounded = of_heads.to(self.dtype).to(self.sums).unflatten(0, (-1, self.group))
            place = batch, self._kv_heads(heads)
            self.values[name][place] = rounded.sum(1)
            if self.group > 1:
                of_rounding = rounded.double().square() + self.least
                self.squares[name][place] += of_rounding.sum((1, 3))

    def _add_to_keys(self, name: str, block: WeightBlock, squares: Tensor) -> None:
        """Add (H, keys, 1) to the keys' squares."""
        of_kv = squares.squeeze(-1).unflatten(0, (-1, self.group)).sum(1)
        self.squares[name][block.batch, self._kv_heads(block.heads), block.keys] += of_kv

    def _add_to_mask(self, totals: dict[str, Tensor], block: WeightBlock, values: Tensor) -> None:
        """Add (H, rows, keys) to the mask's gradient or, without its last dimension, squares."""
        total = totals["attn_mask"]
        sizes = self.values["attn_mask"].shape
        if totals is self.squares:
            values, total = values.sum(-1, keepdim=True), total[..., None]
        places = (slice(block.batch, block.batch + 1), block.heads, block.rows, block.keys)
        summed = [dim for dim in (0, 1, 2) if total.shape[dim + 1] == 1 < values.shape[dim]]
        values = values.sum(summed, keepdim=True) if summed else values
        place = tuple(
            slice(None) if size == 1 or total.shape[dim] == 1 else part
            for dim, (size, part) in enumerate(zip(sizes, places, strict=True))
        )
        total[place] += values[None].to(total.dtype)

    def _kv_heads(self, heads: slice) -> slice:
        return slice(heads.start // self.group, heads.stop // self.group)

    def _zeros(self, size: tuple[int, ...], dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.zeros(size, dtype=dtype, device=self.call.device)
