"""Arguments common to the functions of all versions of FlashAttention.

Windows and causal masks are aligned bottom right. Options that a call does not use are not passed,
so that versions without windows or soft caps still run calls without these features.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from replay.kernels.constraints import AnyCall
from replay.kernels.layout import Packed

KNOWN = ("bottom-right", "window", "softcap")
"""Features beyond SDPA that these functions support."""


def options(call: AnyCall, unlimited: int | None = -1) -> dict[str, Any]:
    """Return all arguments except tensors.

    Args:
        unlimited: value for an unlimited side of a window.
    """
    found: dict[str, Any] = {"softmax_scale": call.scale, "causal": call.is_causal}
    left, right = call.variant.window
    if (left, right) != (None, None):
        found["window_size"] = (
            unlimited if left is None else left,
            unlimited if right is None else right,
        )
    if call.variant.softcap is not None:
        found["softcap"] = call.variant.softcap
    return found


def varlen_arguments(call: AnyCall, packed: Packed, unlimited: int | None = -1) -> dict[str, Any]:
    """Return the arguments of `flash_attn_varlen_func`, with key lengths and pages if present."""
    pages = {} if packed.page_table is None else {"page_table": packed.page_table}
    lengths = {} if packed.seqused_k is None else {"seqused_k": packed.seqused_k}
    return {
        "q": packed.query_THD,
        "k": packed.key_THD,
        "v": packed.value_THD,
        "cu_seqlens_q": packed.q_offsets,
        "cu_seqlens_k": packed.k_offsets,
        "max_seqlen_q": packed.longest_query,
        "max_seqlen_k": packed.longest_key,
        **lengths,
        **pages,
        **options(call, unlimited),
    }


def output_of(returned: Any) -> Tensor:
    """Return the output from a function's result; some versions also return the log-sum-exp."""
    output: Tensor = returned[0] if isinstance(returned, tuple) else returned
    return output
