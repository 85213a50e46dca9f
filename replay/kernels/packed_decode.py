"""Packed batches that only decode, for kernels of batches with one query for each sequence.

An engine packs the queries of a step. If each sequence has one, the packed query (1, Hq, N, D) has
the same elements as a batch (N, Hq, 1, D), so a kernel that knows no packed queries can run it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from torch import Tensor

from capture.call.attention_call import AttentionCall
from capture.hooks.interceptor import Arguments
from replay.kernels.constraints import AnyCall, Constraint

Call = TypeVar("Call", Arguments, AttentionCall)


def several_queries(call: AnyCall) -> str | None:
    """Refuse packed calls that are not known to have exactly one query for each sequence.

    The longest sequence is known on the host, so that nothing waits for the GPU.
    """
    starts, longest = call.cu_seqlens_q, call.variant.max_seqlen_q
    if starts is None:
        return None
    if call.page_table is None:
        return "packed sequences without pages of keys"
    if longest == 1 and starts.shape[0] == call.query.shape[2] + 1:
        return None
    return "packed sequences with several queries: supports one query per sequence"


def limited(limits: Constraint) -> Constraint:
    """Return limits that a packed call meets if it meets them as a batch."""

    def reason(call: AttentionCall) -> str | None:
        return several_queries(call) or limits(_unpacked(call))

    return reason


def attending(attend: Callable[[Arguments], Tensor]) -> Callable[[Arguments], Tensor]:
    """Return a drop-in that also takes packed calls, and raises an error for other ones."""

    def attention(call: Arguments) -> Tensor:
        if reason := several_queries(call):
            raise NotImplementedError(reason)
        output = attend(_unpacked(call))
        return output if call.cu_seqlens_q is None else _packed(output)

    return attention


def prepared(
    prepare: Callable[[AttentionCall], Callable[[], Tensor]],
) -> Callable[[AttentionCall], Callable[[], Tensor]]:
    """Return the preparation of a core that also takes packed calls."""

    def preparing(call: AttentionCall) -> Callable[[], Tensor]:
        core = prepare(_unpacked(call))
        return core if call.cu_seqlens_q is None else lambda: _packed(core())

    return preparing


def _unpacked(call: Call) -> Call:
    if call.cu_seqlens_q is None:
        return call
    query = call.query[0].transpose(0, 1)[:, :, None]
    if isinstance(call, Arguments):
        return call._replace(query=query, cu_seqlens_q=None)
    return replace(call, query=query, cu_seqlens_q=None)


def _packed(output_BHSD: Tensor) -> Tensor:
    return output_BHSD[:, :, 0].transpose(0, 1)[None]
