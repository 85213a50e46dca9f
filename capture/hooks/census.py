"""Counts every attention call of a model, so that the stored calls can predict an entire run.

As JSON a census is `{"signatures": [...], "rows": [{"module", "phase", "signature", "calls",
"kept", "first_step", "last_step"}], "batches": [...]}`, where `signature` is an index into the list
of signatures. A scale that JSON cannot express, such as infinity, is named in `refusal`, and its
calls are not stored.

The batches of an inference engine differ at every step, so their numbers of queries and keys are -1
in the signature, and `batches`, absent without them, has the lengths of their sequences
(`capture.hooks.batch_counts`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from capture.call.attention_variant import beyond, output_dtype
from capture.call.batch import Batch, is_batch
from capture.call.pages import kv_len
from capture.hooks.autocast import cast
from capture.hooks.batch_counts import BatchCounts
from capture.hooks.interceptor import Arguments
from capture.hooks.modules import CallSite
from capture.storage.header import dtype_name
from capture.storage.json_data import with_names


class CallSignature(NamedTuple):
    """The properties that two calls must share to cost the same."""

    query: tuple[int, ...]
    key: tuple[int, ...]
    value: tuple[int, ...]
    dtype: str
    mask: tuple[int, ...] | None
    mask_dtype: str | None
    is_causal: bool
    scale: float | None
    enable_gqa: bool
    beyond: str = ""
    """Options that SDPA does not have, as text (`capture.call.attention_variant.beyond`)."""
    entry_point: str = "sdpa"
    refusal: str = ""
    """Reason why calls with this signature cannot be stored; empty if they can be stored."""

    @classmethod
    def of(cls, arguments: Arguments) -> CallSignature:
        mask = arguments.attn_mask
        query = _sizes(arguments.query)
        return cls(
            query=(*query[:-2], -1, query[-1]) if is_batch(arguments) else query,
            key=_sizes_of_all(arguments.key, arguments),
            value=_sizes_of_all(arguments.value, arguments),
            dtype=dtype_name(output_dtype(arguments)),
            mask=None if mask is None else _sizes(mask),
            mask_dtype=None if mask is None else dtype_name(mask.dtype),
            is_causal=bool(arguments.is_causal),
            scale=_alike(arguments.scale),
            enable_gqa=bool(arguments.enable_gqa),
            beyond=beyond(arguments),
            entry_point=arguments.entry_point,
            refusal=arguments.refusal,
        )

    def to_json(self) -> dict[str, Any]:
        plain = self
        if self.scale is not None and not math.isfinite(self.scale):
            plain = self._replace(scale=None, refusal=self.refusal or f"scale {self.scale}")
        return with_names(plain._asdict(), {"entry_point": "road"})

    @property
    def stratum(self) -> tuple[object, ...]:
        """Signature without the key length, because a growing cache changes it at every step."""
        return (
            self.query,
            self.key[:-2],
            self.key[-1] == self.value[-1],
            self.query[-2] == self.key[-2],
            self.dtype,
            self.mask is None,
            self.is_causal,
            self.beyond,
            self.entry_point,
        )


@dataclass(eq=False, slots=True)
class CallCount:
    """Calls of one module, phase and signature."""

    signature: CallSignature
    first_step: int
    last_step: int
    """Last step in the longest run, because each run of a pipeline begins at step 0."""
    calls: int = 0
    kept: int = 0


@dataclass
class Census:
    """Call counts by module × phase × signature."""

    _counts: dict[tuple[str, str, CallSignature], CallCount] = field(default_factory=dict)
    _batches: BatchCounts[CallSignature] = field(default_factory=BatchCounts)

    @property
    def calls(self) -> int:
        """Number of calls counted so far."""
        # Copied into a list, because other threads may add counts.
        return sum(count.calls for count in [*self._counts.values()])

    def add(self, site: CallSite, arguments: Arguments) -> None:
        """Count a call."""
        count = self.count_of(site, arguments)
        count.calls += 1
        count.last_step = max(count.last_step, site.step)

    def count_of(
        self, site: CallSite, arguments: Arguments, cast_to: torch.dtype | None = None
    ) -> CallCount:
        """Return the count of calls like this one, without counting this call.

        Args:
            cast_to: dtype that autocast casts the arguments to; None without autocast.
        """
        signature = CallSignature.of(cast(arguments, cast_to))
        key = site.module, site.phase, signature
        return self._counts.setdefault(key, CallCount(signature, site.step, site.step))

    def add_batch(self, phase: str, count: CallCount, batch: Batch) -> None:
        """Keep the lengths of a call that is counted."""
        self._batches.add(phase, count.signature, batch)

    def refuse(self, site: CallSite, count: CallCount, reason: str) -> CallCount:
        """Move a call of a count to the count of the calls that cannot be stored, for a reason."""
        signature = count.signature._replace(refusal=reason)
        new = CallCount(signature, site.step, site.step)
        refused = self._counts.setdefault((site.module, site.phase, signature), new)
        count.calls -= 1
        refused.calls += 1
        refused.last_step = max(refused.last_step, site.step)
        return refused

    def items(self) -> list[tuple[tuple[str, str, CallSignature], CallCount]]:
        """Return every count of calls with its module, phase and signature."""
        return [(key, count) for key, count in [*self._counts.items()] if count.calls]

    def to_json(self) -> dict[str, Any]:
        counts = self.items()
        different = dict.fromkeys(signature for (_, _, signature), _ in counts)
        signatures = {signature: index for index, signature in enumerate(different)}
        batches = self._batches.to_json(signatures)
        return {
            "signatures": [signature.to_json() for signature in signatures],
            "rows": [
                {
                    "module": module,
                    "phase": phase,
                    "signature": signatures[signature],
                    "calls": count.calls,
                    "kept": count.kept,
                    "first_step": count.first_step,
                    "last_step": count.last_step,
                }
                for (module, phase, signature), count in counts
            ],
            **({"batches": batches} if batches else {}),
        }


def _alike(scale: float | None) -> float | None:
    """Return the scale. Every NaN becomes the same object, so that two signatures can be equal."""
    return math.nan if scale is not None and math.isnan(scale) else scale


def _sizes_of_all(tensor: Tensor, arguments: Arguments) -> tuple[int, ...]:
    """Return the shape of a key or value; for pages, the shape of the keys in the page table."""
    table = arguments.page_table
    if table is None:
        return _sizes(tensor)
    _, heads, page_size, head_dim = tensor.shape
    length = -1
    if not is_batch(arguments):
        is_packed = arguments.cu_seqlens_q is not None
        length = kv_len(table.shape, page_size, is_packed=is_packed)
    return (arguments.query.shape[0], heads, length, head_dim)


def _sizes(tensor: Tensor) -> tuple[int, ...]:
    """Return a tensor's shape, with -1 for all dimensions of a nested tensor except the first."""
    if tensor.is_nested:
        return (tensor.size(0), *(-1,) * (tensor.dim() - 1))
    return tuple(tensor.shape)
