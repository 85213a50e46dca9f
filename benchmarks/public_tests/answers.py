"""Answers the calls of a library's tests with one of our kernels."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from capture.call.attention_call import AttentionCall
from replay.accuracy import reference
from replay.kernels.kernel_options import kernel_options
from replay.kernels.registry import Kernel, find

GATHERS_PAGES = "triton-varlen"
"""Kernel without pages that replaces FlashInfer's paged prefill: pages are gathered first."""


class Answers:
    """Answers for the functions of a library that is not installed.

    Args:
        kernel: name of the kernel under test.
        asked: library functions that the kernel replaces; None for all. Other functions, with which
            a test compares, are replaced by attention in float64.
    """

    def __init__(self, kernel: str, asked: Collection[str] | None = None) -> None:
        self.kernel: Kernel = find(kernel)
        self.asked = asked
        self.calls = 0
        """Number of calls that the kernel has computed."""

    def __call__(self, call: AttentionCall, function: str) -> Tensor:
        """Compute attention; skip the test with the kernel's reason if the kernel refuses the
        call."""
        if self.asked is not None and function not in self.asked:
            return reference.attention(call).to(call.dtype)
        fitted = self._fitted(call)
        output = self.kernel.attention(**fitted.arguments())
        self.calls += 1
        is_unpacked = call.cu_seqlens_q is not None and fitted.cu_seqlens_q is None
        return output.transpose(0, 1).flatten(1, 2)[None] if is_unpacked else output

    def with_lse(self, call: AttentionCall, function: str) -> tuple[Tensor, Tensor]:
        """Return attention and the natural logarithm of each row's sum of exponentials, (B, Hq,
        Sq).

        The logarithm comes from `triton-varlen`, for packed sequences. For other kernels the
        logarithm is NaN, which fails every comparison.
        """
        fitted = call.without_pages()
        is_asked = self.asked is None or function in self.asked
        if not is_asked or self.kernel.name != GATHERS_PAGES or fitted.cu_seqlens_k is None:
            nothing = call.query.new_full(call.query.shape[:3], torch.nan, dtype=torch.float32)
            return self(call, function), nothing
        from attention_kernels.portable.varlen import packed_prefill

        self._fitted(call)
        query, key, value = (
            each[0].transpose(0, 1) for each in (fitted.query, fitted.key, fitted.value)
        )
        assert fitted.cu_seqlens_q is not None
        output_THD, lse = packed_prefill(
            query,
            key,
            value,
            fitted.cu_seqlens_q,
            fitted.cu_seqlens_k,
            int(fitted.cu_seqlens_q.diff().max()),
            fitted.is_causal,
            scale=fitted.scale,
            seqused_k=fitted.seqused_k,
            sinks=fitted.sinks,
            options=kernel_options(fitted.variant),
            return_lse=True,
        )
        self.calls += 1
        return output_THD.transpose(0, 1)[None], lse[None]

    def _fitted(self, call: AttentionCall) -> AttentionCall:
        if self.kernel.name == GATHERS_PAGES:
            call = call.without_pages()
        if "packed" not in self.kernel.features:
            call = unpacked(call)
        if call.key.dtype != call.dtype:
            pytest.skip("keys of another dtype than the query's")
        if reason := self.kernel.refuses(call):
            pytest.skip(reason)
        return call


def unpacked(call: AttentionCall) -> AttentionCall:
    """Return a packed call of equally long sequences as a batch; any other call unchanged."""
    starts_q, starts_k = call.cu_seqlens_q, call.cu_seqlens_k
    if starts_q is None or not _are_even(starts_q):
        return call
    if call.page_table is None and (starts_k is None or not _are_even(starts_k)):
        return call
    batch = starts_q.shape[0] - 1
    query, key, value = call.query, call.key, call.value
    if call.page_table is None:
        key, value = (_batched(each, batch) for each in (key, value))
    return replace(
        call,
        query=_batched(query, batch),
        key=key,
        value=value,
        cu_seqlens_q=None,
        cu_seqlens_k=None,
    )


def _are_even(starts: Tensor) -> bool:
    return starts.diff().unique().numel() == 1


def _batched(tensor_1HTD: Tensor, batch: int) -> Tensor:
    return tensor_1HTD[0].unflatten(1, (batch, -1)).transpose(0, 1)
