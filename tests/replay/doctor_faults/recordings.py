"""Recorded data of models whose layers are alike, except the layer that provokes a fault.

Each recording is made with `capture.record`, so layers have names and calls have steps. Values are
standard normal unless a layer changes them, and differ from step to step.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import varlen
from torch.nn.attention.bias import causal_lower_right

from capture import record

Values = Callable[[Tensor, Tensor, Tensor], None]
"""Function that changes query, key and value (B, H, S, D) in place."""

Memory = Callable[[Tensor], Tensor]
"""Function that stores a dense tensor (B, H, S, D) with other strides."""


@dataclass(frozen=True)
class Layer:
    """Inputs of one attention layer of a model."""

    batch: int = 1
    heads: int = 4
    kv_heads: int | None = None
    q_len: int = 64
    kv_len: int | None = None
    """Number of keys (default: the number of queries)."""
    head_dim: int = 32
    v_head_dim: int | None = None
    dtype: torch.dtype = torch.float16
    mask: Callable[["Layer"], Tensor] | None = None
    is_causal: bool = False
    is_lower_right: bool = False
    """True for a causal mask whose diagonal ends at the last key."""
    scale: float | None = None
    is_contiguous: bool = False
    """True for (B, H, S, D) in memory, False for a view of (B, S, H, D)."""
    memory: tuple[Memory, Memory, Memory] | None = None
    """Memory of query, key and value, instead of `is_contiguous`."""
    packed: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    """Numbers of queries and of keys of packed sequences; `q_len` and `kv_len` are their sums."""
    values: Values | None = None
    since: int = 0
    """First step in which `values` has an effect."""
    seed: int = 0

    @property
    def keys(self) -> int:
        return self.kv_len or self.q_len

    def inputs(self, generator: torch.Generator, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return query, key and value of one call."""
        kv_heads = self.kv_heads or self.heads
        sizes = (
            (self.q_len, self.heads, self.head_dim),
            (self.keys, kv_heads, self.head_dim),
            (self.keys, kv_heads, self.v_head_dim or self.head_dim),
        )
        query, key, value = (
            torch.randn(self.batch, *size, generator=generator).transpose(1, 2) for size in sizes
        )
        if self.values is not None and step >= self.since:
            self.values(query, key, value)
        query, key, value = (each.to(self.dtype) for each in (query, key, value))
        if self.is_contiguous:
            query, key, value = (each.contiguous() for each in (query, key, value))
        if self.memory is not None:
            stored = zip(self.memory, (query, key, value), strict=True)
            query, key, value = (store(each.contiguous()) for store, each in stored)
        return query, key, value


def varlen_on_cpu(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor
) -> Tensor:
    """Compute `varlen_attn`, which PyTorch has only for GPUs; tensors are (S, H, D)."""
    lengths, lengths_k = cu_seq_q.diff().tolist(), cu_seq_k.diff().tolist()
    parts = (query.split(lengths), key.split(lengths_k), value.split(lengths_k))
    heads_first = ((each.transpose(0, 1) for each in part) for part in zip(*parts, strict=True))
    outputs = [F.scaled_dot_product_attention(*sequence) for sequence in heads_first]
    return torch.cat(outputs, 1).transpose(0, 1)


class Attention(nn.Module):
    """Module that makes one layer's attention call."""

    def __init__(self, layer: Layer, number: int) -> None:
        super().__init__()
        self.layer, self.number = layer, number

    def forward(self, step: int) -> Tensor:
        layer = self.layer
        generator = torch.Generator().manual_seed(1000 * self.number + step)
        mask = None if layer.mask is None else layer.mask(layer)
        if layer.is_lower_right:
            mask = causal_lower_right(layer.q_len, layer.keys)
        if layer.packed is not None:
            query, key, value = (each[0].transpose(0, 1) for each in layer.inputs(generator, step))
            starts, starts_k = (torch.tensor((0, *each)).cumsum(0).int() for each in layer.packed)
            return varlen_on_cpu(query, key, value, starts, starts_k)
        return F.scaled_dot_product_attention(
            *layer.inputs(generator, step),
            attn_mask=mask,
            is_causal=layer.is_causal,
            scale=layer.scale,
            enable_gqa=layer.kv_heads is not None,
        )


class Block(nn.Module):
    def __init__(self, layer: Layer, number: int) -> None:
        super().__init__()
        self.attn = Attention(layer, number)

    def forward(self, step: int) -> None:
        self.attn(step)


class Model(nn.Module):
    """Model with the layers `blocks.0.attn`, `blocks.1.attn` …"""

    def __init__(self, layers: Sequence[Layer]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(each, number) for number, each in enumerate(layers))

    def forward(self, step: int) -> None:
        for block in self.blocks:
            block(step)


@dataclass(frozen=True)
class Recording:
    """Model, and the number of its forward passes to record."""

    layers: tuple[Layer, ...]
    steps: int = 2

    def write(self, directory: Path) -> None:
        """Record every call of the model into a new directory."""
        model, calls = Model(self.layers), self.steps * len(self.layers)
        with (
            torch.no_grad(),
            patch.object(varlen, "varlen_attn", varlen_on_cpu),
            record(model, directory, max=calls, sample="first") as recording,
        ):
            for step in range(self.steps):
                model(step)
        assert recording.kept == calls, recording.problems


def alike(count: int, layer: Layer = Layer(), **others: Layer) -> tuple[Layer, ...]:
    """Return `count` equal layers; a keyword such as `_2` replaces that layer."""
    return tuple(others.get(f"_{number}", layer) for number in range(count))


def one(number: int, layer: Layer, base: Layer = Layer(), steps: int = 2) -> Recording:
    """Return a recording of four layers that are equal except one."""
    return Recording(alike(4, base, **{f"_{number}": layer}), steps)


# Memory

dense = Tensor.contiguous


def projected(tensor: Tensor) -> Tensor:
    """Store (B, S, H, D), as a projection does."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def transposed(tensor: Tensor) -> Tensor:
    """Store (B, H, D, S)."""
    return tensor.mT.contiguous().mT


def shared(tensor: Tensor) -> Tensor:
    """Store the first head, which all heads share."""
    return tensor[:, :1].expand_as(tensor)


def cached(tensor: Tensor) -> Tensor:
    """Store the tensor as the first half of a cache."""
    return torch.cat((tensor, tensor), 2)[:, :, : tensor.shape[2]]


# Values


def large_scores(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Give the keys of head 2 a shared offset, so that their products exceed float16's range."""
    query[:, 2, :, 5] = 250.0
    key[:, 2, :, 5] = 300.0


def cancelling_channels(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Give head 1 two channels whose products are ±67,600 and cancel."""
    query[:, 1, :, 3] = query[:, 1, :, 20] = key[:, 1, :, 3] = 260.0
    key[:, 1, :, 20] = -260.0


def sharp_scores(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Raise the largest scores of head 3 above 20, whose exponential is 500 million."""
    query[:, 3] *= 7.0


def large_values(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Set all values of head 0 near 3,000; the sum of 128 of them exceeds float16's range."""
    query[:, 0] *= 0.1
    value[:, 0] += 3_000.0


def massive_token(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Set one token's value in head 1 beyond float16's range, in two channels."""
    value[:, 1, 9, 4:6] = 2e5


def key_offset(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Set one channel of head 2's keys to 900; the sum of 128 of them exceeds float16's range."""
    key[:, 2, :, 11] = 900.0


def outlier_channel(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Set one channel of all keys near 200, with variation."""
    key[..., 7] = 200.0 + 10.0 * key[..., 7]


def mild_outlier_channel(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Set one channel of all keys near 30, which is harmless in 8 bits after smoothing."""
    key[..., 7] = 30.0 + 2.0 * key[..., 7]


def outlier_channel_of_head_1(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Set one channel of head 1's keys near -600, with variation."""
    key[:, 1, :, 13] = -600.0 + 10.0 * key[:, 1, :, 13]


def late_sink(at: int, head: int | None, score: float) -> Values:
    """Return a change that gives key `at` this score for all queries, in one head or in all."""

    def change(query: Tensor, key: Tensor, value: Tensor) -> None:
        heads = slice(None) if head is None else slice(head, head + 1)
        query[:, heads, :, 0] = 4.0
        key[:, heads, at] *= 0.1
        key[:, heads, at, 0] = score * math.sqrt(query.shape[-1]) / 4.0

    return change


def not_a_number(number: int, rows: slice) -> Values:
    """Return a change that sets rows of query, key or value (0, 1 or 2) to NaN."""

    def change(*tensors: Tensor) -> None:
        tensors[number][:, :, rows] = math.nan

    return change


def infinite_key(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Set one channel of a key in head 2 beyond float16's range."""
    key[:, 2, 40, 5] = 70_000.0


# Masks


def _generator(layer: Layer) -> torch.Generator:
    return torch.Generator().manual_seed(7_000 + layer.seed)


def as_bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the mask as numbers: 0 for visible keys, -inf for masked keys."""
    return torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, -math.inf)


def some(layer: Layer) -> Tensor:
    """Keep two thirds of the keys visible, at random: bool (B, 1, Sq, Sk)."""
    size = (layer.batch, 1, layer.q_len, layer.keys)
    return torch.rand(size, generator=_generator(layer)) < 2 / 3


def some_for_each_head(layer: Layer) -> Tensor:
    """Keep two thirds of each head's keys visible, at random: bool (B, H, Sq, Sk)."""
    size = (layer.batch, layer.heads, layer.q_len, layer.keys)
    return torch.rand(size, generator=_generator(layer)) < 2 / 3


def some_but_all_for_the_first(layer: Layer) -> Tensor:
    """Keep all keys visible to the first query, and a random two thirds to the others."""
    mask = some(layer)
    mask[:, :, 0] = True
    return mask


def some_as_bias(layer: Layer) -> Tensor:
    return as_bias(some(layer), layer.dtype)


def padding(layer: Layer) -> Tensor:
    """Mask the last 11·(b + 1) keys of batch b: bool (B, 1, 1, Sk)."""
    ends = layer.keys - 11 * (1 + torch.arange(layer.batch))
    return (torch.arange(layer.keys) < ends[:, None])[:, None, None]


def window(layer: Layer) -> Tensor:
    """Keep sixteen keys visible on each side of a query: bool (1, 1, Sq, Sk)."""
    distance = torch.arange(layer.q_len)[:, None] - torch.arange(layer.keys)
    return (distance.abs() <= 16)[None, None]


def upper(layer: Layer) -> Tensor:
    """Let each query see its own key and later keys: bool (1, 1, Sq, Sk)."""
    return torch.ones(1, 1, layer.q_len, layer.keys, dtype=torch.bool).triu()


def alibi(layer: Layer) -> Tensor:
    """Return -slope · distance, with a different slope for each head: (1, H, Sq, Sk)."""
    distance = torch.arange(layer.q_len)[:, None] - torch.arange(layer.keys)
    slopes = 2.0 ** -torch.arange(1, layer.heads + 1)
    return (-slopes[:, None, None] * distance.abs())[None].to(layer.dtype)


def relative_positions(layer: Layer) -> Tensor:
    """Return a random bias for each query and key, the same for all heads: (1, 1, Sq, Sk)."""
    size = (1, 1, layer.q_len, layer.keys)
    return (3.0 * torch.randn(size, generator=_generator(layer))).to(layer.dtype)


def padding_times_infinity(layer: Layer) -> Tensor:
    """Multiply what is masked by -inf, which gives NaN for visible keys: (B, 1, 1, Sk)."""
    return ~padding(layer) * torch.tensor(-math.inf, dtype=layer.dtype)


# Recordings

PLAIN = Layer()
LONG = Layer(q_len=256)
BF16 = Layer(dtype=torch.bfloat16)
FP32 = Layer(dtype=torch.float32)
KEYS_128 = Layer(kv_len=128)
MASKED = Layer(mask=some)
MASKED_256 = Layer(q_len=256, mask=some)
DENSE = Layer(is_contiguous=True)
CACHED = Layer(q_len=1, kv_len=48, memory=(dense, dense, dense))
WIDE = Layer(head_dim=64)
SQUARE = Layer(is_causal=True)
CAUSAL = Layer(heads=8, q_len=48, is_causal=True)
IMAGES = Layer(packed=((20, 33, 11), (20, 33, 11)))
ALL_NAN = Layer(values=not_a_number(0, slice(None)), since=1)

RECORDINGS: dict[str, Recording] = {
    "large-scores": Recording(alike(5, _3=Layer(values=large_scores))),
    "large-scores-float32": Recording(alike(4, FP32, _2=replace(FP32, values=large_scores))),
    "large-scores-late": Recording(alike(4, _1=Layer(values=large_scores, since=2)), steps=3),
    "cancelling-channels": Recording(alike(4, _1=Layer(values=cancelling_channels))),
    "sharp-scores": Recording(alike(4, _2=Layer(values=sharp_scores))),
    "large-values": Recording(alike(4, KEYS_128, _1=replace(KEYS_128, values=large_values))),
    "massive-token": Recording(alike(4, BF16, _2=replace(BF16, values=massive_token))),
    "key-offset": Recording(alike(4, KEYS_128, _0=replace(KEYS_128, values=key_offset))),
    "outlier": Recording(alike(5, LONG, _2=replace(LONG, values=outlier_channel))),
    "outlier-bf16": Recording(alike(4, BF16, _0=replace(BF16, values=outlier_channel))),
    "outlier-late": Recording(alike(4, _3=Layer(values=outlier_channel, since=1)), steps=3),
    "outlier-head": Recording(alike(4, _3=Layer(values=outlier_channel_of_head_1))),
    "bool-mask": Recording(alike(4, _1=MASKED)),
    "float-mask": Recording(alike(4, MASKED, _2=Layer(mask=some_as_bias))),
    "padding": Recording(alike(4, Layer(batch=2), _2=Layer(batch=2, mask=padding))),
    "padding-beside-full": one(
        3, Layer(batch=2, mask=padding), Layer(batch=2, mask=some_for_each_head)
    ),
    "first-row-unmasked": Recording(alike(4, MASKED, _1=Layer(mask=some_but_all_for_the_first))),
    "masked-cross-attention": Recording(alike(4, MASKED, _2=Layer(kv_len=96, mask=some))),
    "masked-long": Recording(alike(4, MASKED, _3=MASKED_256)),
    "masked-grouped": Recording(alike(4, MASKED, _1=Layer(kv_heads=2, mask=some))),
    "upper": Recording(alike(4, _0=Layer(mask=upper))),
    "batched-masks": Recording(alike(4, MASKED, _2=Layer(batch=3, mask=some))),
    "alibi": Recording(alike(4, MASKED, _3=Layer(mask=alibi))),
    "alibi-grouped": Recording(alike(4, Layer(mask=alibi), _2=Layer(kv_heads=2, mask=alibi))),
    "relative-positions": Recording(alike(4, MASKED, _1=Layer(mask=relative_positions))),
    "late-sink": Recording(alike(5, LONG, _3=replace(LONG, values=late_sink(201, 2, 18.0)))),
    "late-sink-everywhere": one(1, replace(LONG, values=late_sink(250, None, 18.0)), LONG),
    "late-sink-late": one(2, replace(LONG, values=late_sink(140, 0, 18.0), since=1), LONG),
    "own-scale": Recording(alike(4, _2=Layer(scale=0.25))),
    "one-float32": Recording(alike(4, _1=FP32)),
    "one-contiguous": Recording(alike(4, _3=Layer(is_contiguous=True))),
    "one-long": Recording(alike(4, _1=LONG)),
    "five-heads": Recording(alike(4, Layer(heads=8), _2=Layer(heads=5))),
    "three-batches": Recording(alike(4, Layer(batch=2), _3=Layer(batch=3))),
    "one-batched": Recording(alike(4, _1=Layer(batch=2))),
    "one-grouped": Recording(alike(4, _2=Layer(kv_heads=2))),
    "wide-values": Recording(alike(4, _0=Layer(v_head_dim=48))),
    "more-queries": Recording(alike(4, _2=Layer(q_len=128, kv_len=64))),
    "window": Recording(alike(4, Layer(q_len=128, mask=some), _3=Layer(q_len=128, mask=window))),
    "odd-keys": Recording(alike(4, KEYS_128, _2=Layer(kv_len=77))),
    "odd-queries": Recording(alike(4, KEYS_128, _1=Layer(q_len=77, kv_len=128))),
    "odd-both": Recording(alike(5, Layer(q_len=128), _3=Layer(q_len=201))),
    "one-more": Recording(alike(4, Layer(q_len=128), _1=Layer(q_len=129))),
    "causal-prefix": one(2, replace(SQUARE, q_len=32, kv_len=96), SQUARE),
    "causal-short-prefix": one(
        1, replace(SQUARE, q_len=8, kv_len=72), replace(SQUARE, q_len=32, kv_len=96)
    ),
    "causal-more-queries": one(1, replace(SQUARE, q_len=96, kv_len=64), SQUARE),
    "causal-decode": one(3, replace(SQUARE, q_len=1, kv_len=64), SQUARE),
    "lower-right": one(2, Layer(q_len=32, kv_len=96, is_lower_right=True), SQUARE),
    "one-bucket": Recording(alike(4, Layer(q_len=96), _2=PLAIN), steps=3),
    "one-decode": Recording(alike(4, _3=Layer(q_len=1, kv_len=96)), steps=3),
    "one-cross-attention": Recording(alike(4, _1=Layer(kv_len=80)), steps=3),
    "second-mask": Recording(
        (PLAIN, Layer(mask=some), PLAIN, Layer(mask=some, seed=1), Layer(q_len=96, mask=some))
    ),
    "second-scale": Recording((PLAIN, Layer(q_len=96), Layer(scale=0.5), PLAIN)),
    "value-view": one(2, Layer(q_len=62, head_dim=64, memory=(dense, dense, projected)), DENSE),
    "expanded-keys": one(1, Layer(memory=(dense, shared, shared)), DENSE),
    "transposed-keys": one(3, Layer(memory=(dense, transposed, dense)), DENSE),
    "query-view": one(1, Layer(memory=(projected, dense, dense)), DENSE),
    "static-cache": one(2, replace(CACHED, memory=(dense, cached, cached)), CACHED),
    "plain": Recording(alike(3)),
    "head-dim-64": one(1, WIDE),
    "few-tokens": one(2, Layer(heads=16, q_len=8)),
    "text": one(3, Layer(kv_len=77)),
    "stable-diffusion": Recording(tuple(Layer(heads=8, head_dim=dim) for dim in (40, 80, 160, 64))),
    "head-dim-72": one(1, Layer(head_dim=72), WIDE),
    "head-dim-96": one(2, Layer(head_dim=96), WIDE),
    "head-dim-36": one(3, Layer(heads=8, head_dim=36)),
    "motion-module": one(1, Layer(batch=8_200, heads=8, q_len=2, head_dim=8), Layer(head_dim=40)),
    "long-cache": one(
        2,
        Layer(heads=2, q_len=1, kv_len=98_304, head_dim=16),
        Layer(q_len=1, kv_len=1_000),
    ),
    "video": one(1, Layer(heads=2, kv_len=4_608), Layer(heads=2, kv_len=1_024)),
    "speech": one(3, Layer(q_len=32, kv_len=1_500), Layer(q_len=32, kv_len=448)),
    "long-prompt": one(1, replace(CAUSAL, heads=2, q_len=600), CAUSAL),
    "packed": one(1, IMAGES, Layer(packed=((64,), (64,)))),
    "packed-text": one(2, Layer(kv_len=96, packed=((20, 33, 11), (7, 12, 77))), IMAGES),
    "guided-text": one(1, Layer(batch=2, kv_len=77), Layer(batch=2)),
    "groups-of-seven": one(
        1, Layer(heads=14, kv_heads=2, q_len=40), Layer(heads=8, kv_heads=2, q_len=40)
    ),
    "grouped-causal": one(3, replace(CAUSAL, kv_heads=2), CAUSAL),
    "nan-token": one(2, Layer(values=not_a_number(0, slice(17, 18)), since=1), steps=3),
    "infinite-key": one(1, Layer(values=infinite_key, since=2), steps=3),
    "nan-mask": one(3, Layer(mask=padding_times_infinity)),
    "nan-tail": one(1, replace(CAUSAL, values=not_a_number(2, slice(-11, None))), CAUSAL),
    "black-picture": Recording(alike(4, ALL_NAN), steps=3),
}

HEALTHY = Recording(
    (
        PLAIN,
        LONG,
        BF16,
        FP32,
        Layer(kv_heads=2),
        Layer(heads=6, kv_heads=1, q_len=48),
        Layer(batch=3, q_len=40),
        Layer(q_len=77),
        Layer(q_len=129, kv_len=77),
        Layer(q_len=1, kv_len=201),
        Layer(v_head_dim=48),
        Layer(scale=0.3),
        Layer(is_contiguous=True),
        Layer(is_causal=True),
        Layer(q_len=32, kv_len=96, is_causal=True),
        Layer(q_len=96, kv_len=64, is_causal=True),
        MASKED,
        Layer(mask=some_as_bias),
        Layer(batch=2, mask=padding),
        Layer(mask=alibi),
        Layer(kv_heads=2, mask=some_for_each_head),
        Layer(q_len=128, mask=window, dtype=torch.bfloat16),
        replace(LONG, values=mild_outlier_channel),
        replace(LONG, values=late_sink(201, 2, 18.0)),
        Layer(kv_len=128, values=large_values),
    ),
    steps=8,
)
"""200 calls for healthy kernels, including all inputs that provoke a fault in a broken kernel."""
