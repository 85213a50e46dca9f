"""A Triton kernel that writes far outside its tensor, so that CUDA ends the process's context."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _write_far_away(output, offset: tl.int64):  # type: ignore[no-untyped-def]
    tl.store(output + offset, 1.0)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    output = torch.empty_like(query)
    _write_far_away[(1,)](output, 1 << 44)
    return output
