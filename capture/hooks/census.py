"""Counts every attention call of a model, so that the stored calls can predict an entire run.

As JSON a census is `{"signatures": [...], "rows": [{"module", "phase", "signature", "calls",
"kept", "first_step", "last_step"}]}`, where `signature` is an index into the list of signatures.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from capture.hooks.autocast import cast
from capture.hooks.interceptor import Arguments
from capture.hooks.modules import Site
from capture.storage.header import dtype_name


class Signature(NamedTuple):
    """What two calls must have in common to cost the same."""

    query: tuple[int, ...]
    key: tuple[int, ...]
    value: tuple[int, ...]
    dtype: str
    mask: tuple[int, ...] | None
    mask_dtype: str | None
    is_causal: bool
    scale: float | None
    enable_gqa: bool

    @classmethod
    def of(cls, arguments: Arguments) -> Signature:
        mask = arguments.attn_mask
        return cls(
            query=_sizes(arguments.query),
            key=_sizes(arguments.key),
            value=_sizes(arguments.value),
            dtype=dtype_name(arguments.query.dtype),
            mask=None if mask is None else _sizes(mask),
            mask_dtype=None if mask is None else dtype_name(mask.dtype),
            is_causal=bool(arguments.is_causal),
            scale=arguments.scale,
            enable_gqa=bool(arguments.enable_gqa),
        )

    @property
    def stratum(self) -> tuple[object, ...]:
        """The signature without the key length, which a growing cache changes at every step."""
        return (
            self.query,
            self.key[:-2],
            self.key[-1] == self.value[-1],
            self.query[-2] == self.key[-2],
            self.dtype,
            self.mask is None,
            self.is_causal,
        )


@dataclass(eq=False, slots=True)
class Count:
    """Calls of one module, phase and signature."""

    signature: Signature
    first_step: int
    last_step: int
    calls: int = 0
    kept: int = 0


@dataclass
class Census:
    """Call counts by module × phase × signature."""

    calls: int = 0
    _counts: dict[tuple[str, str, Signature], Count] = field(default_factory=dict)
    _found: dict[tuple[object, ...], Count] = field(default_factory=dict)
    """The same by what is quickly read from a call."""

    def add(self, site: Site, arguments: Arguments, cast_to: torch.dtype | None = None) -> Count:
        """Count a call, and return the count of its like.

        Args:
            cast_to: the dtype that autocast casts the arguments to.
        """
        self.calls += 1
        query, key, value, mask, _, is_causal, scale, enable_gqa = arguments
        like = None
        try:
            like = (  # what tells calls apart, without a conversion of each size and dtype
                site.module,
                site.phase,
                query.shape,
                key.shape,
                value.shape,
                query.dtype,
                None if mask is None else (mask.shape, mask.dtype),
                is_causal,
                scale,
                enable_gqa,
                cast_to,
            )
            count = self._found[like]
        except (KeyError, RuntimeError, TypeError):  # not every tensor has a shape to compare
            count = self._find(site, arguments, cast_to, like)
        count.calls += 1
        count.last_step = site.step
        return count

    def _find(
        self,
        site: Site,
        arguments: Arguments,
        cast_to: torch.dtype | None,
        like: tuple[object, ...] | None,
    ) -> Count:
        signature = Signature.of(cast(arguments, cast_to))
        key = site.module, site.phase, signature
        count = self._counts.setdefault(key, Count(signature, site.step, site.step))
        if like is not None and not arguments.query.is_nested:  # each of those is unlike any other
            with contextlib.suppress(TypeError):  # symbolic sizes have no hash
                self._found[like] = count
        return count

    def modules(self) -> list[str]:
        """Return the paths of the modules that called attention, in order of their first call."""
        return list(dict.fromkeys(module for module, _, _ in self._counts))

    def phases(self) -> list[str]:
        """Return the phases in which attention was called, in order of their first call."""
        return list(dict.fromkeys(phase for _, phase, _ in self._counts))

    def to_json(self) -> dict[str, Any]:
        signatures = {
            signature: index
            for index, signature in enumerate(
                dict.fromkeys(signature for _, _, signature in self._counts)
            )
        }
        return {
            "signatures": [signature._asdict() for signature in signatures],
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
                for (module, phase, signature), count in self._counts.items()
            ],
        }


def _sizes(tensor: Tensor) -> tuple[int, ...]:
    """Return the shape, with -1 for possibly ragged dimensions of a nested tensor."""
    if tensor.is_nested:
        return (tensor.size(0), *(-1,) * (tensor.dim() - 1))
    return tuple(tensor.shape)
