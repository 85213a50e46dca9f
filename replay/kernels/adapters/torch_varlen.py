"""PyTorch's own attention over packed sequences: `torch.nn.attention.varlen.varlen_attn`.

The function runs PyTorch's built-in FlashAttention 2 on THD. A causal mask is a window with a right
side of 0, aligned bottom right. Each release since 2.10 has added parameters; a call that needs a
missing parameter is refused.
"""

from __future__ import annotations

import functools
import inspect

import torch
from torch import Tensor

from replay.kernels import constraints as limits
from replay.kernels.constraints import AnyCall
from replay.kernels.layout import Packed, on_packed
from replay.kernels.libraries import Library
from replay.kernels.wrapping import at_once, register_adapted

LIBRARY = Library(
    module="torch.nn.attention.varlen",
    package="torch",
    install="pip install 'torch>=2.11'",
    functions=("varlen_attn",),
    runs_on=lambda capability: capability >= (8, 0),
    needs="8.0 or higher",
)


@functools.cache
def _parameters() -> frozenset[str]:
    """Return the parameters of this PyTorch's `varlen_attn`."""
    return frozenset(inspect.signature(LIBRARY.load().varlen_attn).parameters)


def _unavailable(device: torch.device) -> str | None:
    if reason := LIBRARY.unavailable(device):
        return reason
    if "window_size" not in _parameters():
        return f"needs PyTorch 2.11, whose varlen_attn has windows (this is {torch.__version__})"
    return None


def _has_parameters(call: AnyCall) -> str | None:
    asked = {"enable_gqa": call.query.shape[1] != call.key.shape[1]}
    asked["seqused_k"] = call.seqused_k is not None
    asked["block_table"] = call.page_table is not None
    missing = [name for name, is_asked in asked.items() if is_asked and name not in _parameters()]
    return (
        f"the varlen_attn of PyTorch {torch.__version__} has no {missing[0]}" if missing else None
    )


def _run(call: AnyCall, packed: Packed) -> Tensor:
    left, right = call.variant.window
    if call.is_causal:
        right = 0
    is_grouped = call.query.shape[1] != call.key.shape[1]
    output: Tensor = LIBRARY.load().varlen_attn(
        packed.query_THD,
        packed.key_THD,
        packed.value_THD,
        packed.q_offsets,
        packed.k_offsets,
        packed.longest_query,
        packed.longest_key,
        scale=call.scale,
        window_size=(-1 if left is None else left, -1 if right is None else right),
        **({"enable_gqa": True} if is_grouped else {}),
        **({} if packed.seqused_k is None else {"seqused_k": packed.seqused_k}),
        **({} if packed.page_table is None else {"block_table": packed.page_table}),
    )
    return output


_prepare = on_packed(_run)
register_adapted(
    "torch-varlen",
    LIBRARY,
    at_once(_prepare),
    (
        limits.no_dropout,
        limits.half_precision,
        limits.same_value_dim,
        limits.max_head_dim(256),
        limits.multiple_of_8,
        *limits.PADDED_OR_PACKED,
        _has_parameters,
    ),
    "PyTorch's varlen_attn on packed sequences, and on padded batches, packed by their mask",
    prepare=_prepare,
    unavailable=_unavailable,
    features=("bottom-right", "window", "packed", "key-lengths", "paged"),
    differentiable=True,
)
