"""The arguments that FlashAttention's functions have in common, whichever their version.

Windows and causality follow the bottom-right diagonal. What a call does not ask is not passed, so
that versions without windows or soft caps serve the calls that need none.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from replay.kernels.constraints import AnyCall
from replay.kernels.layout import Packed

KNOWN = ("bottom-right", "window", "softcap")
"""What these functions know beyond SDPA."""


def options(call: AnyCall, unlimited: int | None = -1) -> dict[str, Any]:
    """Everything but tensors.

    Args:
        unlimited: what stands in a window for a side without a limit.
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
    """Those of `flash_attn_varlen_func`, `seqused_k` and `page_table` if there are any."""
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
    """The output, of functions that return the log-sum-exp too in some versions."""
    output: Tensor = returned[0] if isinstance(returned, tuple) else returned
    return output
