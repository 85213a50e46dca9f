"""Number formats of caches: rounds recorded keys and values as a cache would store them.

A cache stores numbers q of few bits and a scale s. A kernel reads back x' of an element x:

    bf16         x' = x, rounded to bfloat16
    fp8          x' = s · e4m3(x / s),            s = max|x| / 448, or s = 1 without a scale
    int8         x' = s · round(x / s),           s = max|x| / 127
    int4         x' = z + s · round((x - z) / s), s = (max x - z) / 15, z = min x

`e4m3` rounds to the nearest FP8 number and limits its argument to ±448, the largest one
(Micikevicius et al. 2022, "FP8 formats for deep learning"). Maxima and minima are over the elements
that share a scale: all of a tensor, those of a key head, or those of a token in a key head. INT4
shares one in groups of 32 adjacent channels of a token, by the formula of KIVI (Liu et al. 2024).

A format whose name ends in `-rotated` rounds the keys after an orthogonal Hadamard rotation R of
the channels, which spreads large channels over all (QuaRot, Ashkboos et al. 2024). The query is
rotated too: (q R)·(k R) = q·k, so only the rounding changes the scores. Here the rounded keys are
rotated back instead, which gives the same scores.

Scales are the best for the call: its own maxima. A server has scales per tensor and per head from
its checkpoint, so its errors may be larger. Scales per token are made when the token is stored.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from attention_replay.errors import Error
from capture.call.attention_call import AttentionCall
from replay.accuracy.quantised import FP8_MAX, INT8_MAX, to_fp8, to_int8

LEVELS_INT4 = 15.0
GROUP = 32
"""Number of adjacent channels that share a scale in INT4."""

SHARED: dict[str, tuple[int, ...]] = {"tensor": (0, 1, 2, 3), "head": (0, 2, 3), "token": (3,)}
"""Dimensions of (B, Hkv, Sk, D) that share a scale. A scale per token is also per key head."""

ROTATED = "-rotated"


class FormatError(Error):
    """A format that does not exist; the message gives the remedy."""


@dataclass(frozen=True)
class CacheFormat:
    """A format of a cache."""

    name: str
    numbers: Literal["bf16", "fp8", "int8", "int4"]
    scale: str = ""
    """Key of `SHARED`; empty for none, and for INT4."""
    truncated: bool = False
    """True if INT8 numbers are rounded towards zero instead of to the nearest."""
    vllm: str = ""
    """Value of vLLM's `--kv-cache-dtype`; empty if it has none (read from its version 0.22.1)."""
    needs: str = ""
    """Condition under which vLLM stores this format; empty if its flag is enough."""
    kernel: str = ""
    """Name of our kernel that decodes over a cache of this format; empty if there is none."""
    rotated: bool = False

    @classmethod
    def parse(cls, name: str) -> CacheFormat:
        """Return the format of a name such as `int4-group-rotated`.

        Raises:
            FormatError: there is no such format.
        """
        plain = FORMATS.get(name.removesuffix(ROTATED))
        if plain is None:
            raise FormatError(
                f"no format {name!r}: choose from {', '.join(FORMATS)}, each also with {ROTATED}"
            )
        if name in FORMATS:
            return plain
        return replace(plain, name=name, rotated=True, vllm="", needs="", kernel="")

    def key(self, key: Tensor) -> Tensor:
        """Return keys (B, Hkv, Sk, D) as the cache returns them, in float32."""
        if not self.rotated:
            return self.value(key)
        rotation = rotation_of(key.shape[-1]).to(key.device)
        return (self.value(key.double() @ rotation).double() @ rotation).float()

    def value(self, value: Tensor) -> Tensor:
        """Return values (B, Hkv, Sk, Dv) as the cache returns them, in float32."""
        values = value.float()
        if self.numbers == "bf16":
            return values.bfloat16().float()
        if self.numbers == "int4":
            return _int4(values)
        if not self.scale:
            return to_fp8(values.clamp(-FP8_MAX, FP8_MAX), values.new_tensor(FP8_MAX))
        if not values.numel():
            return values
        largest = values.abs().amax(SHARED[self.scale], keepdim=True)
        if self.numbers == "fp8":
            return to_fp8(values, largest)
        if self.truncated:
            scale = _positive(largest / INT8_MAX)
            return (values * (1 / scale)).trunc() * scale
        return to_int8(values, largest)


_SCALES = "the checkpoint has scales per"

FORMATS = {
    each.name: each
    for each in (
        CacheFormat("bf16", "bf16", kernel="triton-decode"),
        CacheFormat("fp8", "fp8", vllm="fp8", needs="no scales in the checkpoint"),
        CacheFormat("fp8-tensor", "fp8", "tensor", vllm="fp8", needs=f"{_SCALES} tensor"),
        CacheFormat("fp8-head", "fp8", "head", vllm="fp8", needs=f"{_SCALES} head"),
        CacheFormat(
            "fp8-token", "fp8", "token", vllm="fp8_per_token_head", kernel="triton-decode-fp8"
        ),
        CacheFormat("int8-token", "int8", "token", kernel="triton-decode-int8"),
        # vLLM's function that writes this cache converts float32 to int8 without rounding.
        CacheFormat(
            "int8-token-truncated", "int8", "token", truncated=True, vllm="int8_per_token_head"
        ),
        CacheFormat("int4-group", "int4"),
    )
}
"""Formats by name, except the rotated ones."""

DEFAULT = (*FORMATS, "int4-group" + ROTATED)


def stored(
    call: AttentionCall, key: Callable[[Tensor], Tensor], value: Callable[[Tensor], Tensor]
) -> AttentionCall:
    """Return a call whose keys and values went through two functions.

    Values that are the first channels of their keys (absorbed MLA) go through that of the keys.
    """
    keys = key(call.key)
    if call.value_is_in_key:
        return replace(call, key=keys, value=keys[..., : call.value.shape[-1]])
    return replace(call, key=keys, value=value(call.value))


@functools.lru_cache(maxsize=16)
def rotation_of(width: int) -> Tensor:
    """Return a float64 matrix (D, D) of Hadamard blocks, of the largest power of 2 that divides D.

    The matrix is orthogonal and symmetric, so it is its own inverse.
    """
    size = width & -width
    block = torch.ones(1, 1, dtype=torch.float64)
    while block.shape[0] < size:
        block = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=block.dtype), block)
    return torch.block_diag(*[block / size**0.5] * (width // size))


def _int4(values: Tensor) -> Tensor:
    groups = []
    for group in values.split(GROUP, dim=-1):
        lowest, highest = group.amin(-1, keepdim=True), group.amax(-1, keepdim=True)
        scale = _positive((highest - lowest) / LEVELS_INT4)
        groups.append(lowest + scale * ((group - lowest) / scale).round())
    return torch.cat(groups, -1)


def _positive(scale: Tensor) -> Tensor:
    return scale.clamp_min(torch.finfo(torch.float32).tiny)
