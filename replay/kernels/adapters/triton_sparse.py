"""Our Triton kernels that decode with a share of the keys: in one piece, and in pages.

The drop-in chooses tokens and attends to them; the core is attention to tokens that are given, as a
model with a cheap way of choosing has it. What is chosen are the highest-scoring keys of each
key/value head (`replay/kernels/triton/token_choice.py`): scoring reads every key, so the drop-in
cannot be much faster than attention to all of them, and its error is the least that any choice of
as many keys leaves. Options: `keep`, the share of keys kept (`--keep`), and `page_size`.

Not by default, since what they leave out is for their user to decide.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from capture.call import AttentionCall
from replay.kernels.adapters.triton_decode import (
    DECODE_LIMITS,
    paged,
)
from replay.kernels.chosen_keys import mask_of_tokens
from replay.kernels.constraints import all_of, no_causal, padding_mask_only
from replay.kernels.layout import padding_keys, refuse
from replay.kernels.library import TRITON_INSTALL, triton_unavailable
from replay.kernels.pages import DEFAULT_PAGE_SIZE, check_page_size
from replay.kernels.registry import Kernel, register

DEFAULT_KEEP = 0.02


def _choose(
    query: Tensor, key: Tensor, attn_mask: Tensor | None, scale: float | None, keep: float
) -> Tensor:
    """(B, Hkv, K) int32."""
    from replay.kernels.triton.token_choice import choose_tokens

    allowed = None
    if attn_mask is not None:
        allowed = padding_keys(attn_mask, key.shape[0], key.shape[2])
    return choose_tokens(query, key, keep, allowed=allowed, scale=scale)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    keep: float,
) -> Tensor:
    from replay.kernels.triton.sparse_decode import sparse_decode

    refuse(None, dropout_p)
    indices = _choose(query, key, attn_mask, scale, keep)
    return sparse_decode(query, key, value, indices, scale=scale)


def _prepare(call: AttentionCall, keep: float) -> Callable[[], Tensor]:
    from replay.kernels.triton.sparse_decode import sparse_decode

    indices = _choose(call.query, call.key, call.attn_mask, call.scale, keep)
    return lambda: sparse_decode(call.query, call.key, call.value, indices, scale=call.scale)


def _chosen(call: AttentionCall, keep: float) -> Tensor:
    return mask_of_tokens(_choose(call.query, call.key, call.attn_mask, call.scale, keep), call)


def _attend_paged(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    keep: float,
    page_size: int,
) -> Tensor:
    from replay.kernels.triton.sparse_decode import paged_sparse_decode
    from replay.kernels.triton.token_choice import choose_paged_tokens

    refuse(None, dropout_p)
    cache, _ = paged(key, value, attn_mask, page_size)
    indices = choose_paged_tokens(
        query, cache.key_pages, cache.block_table, cache.lengths, keep, scale=scale
    )
    return paged_sparse_decode(query, *cache, indices, scale=scale)


def _prepare_paged(call: AttentionCall, keep: float, page_size: int) -> Callable[[], Tensor]:
    from replay.kernels.triton.sparse_decode import paged_sparse_decode
    from replay.kernels.triton.token_choice import choose_paged_tokens

    cache, _ = paged(call.key, call.value, call.attn_mask, page_size)
    indices = choose_paged_tokens(
        call.query, cache.key_pages, cache.block_table, cache.lengths, keep, scale=call.scale
    )
    return lambda: paged_sparse_decode(call.query, *cache, indices, scale=call.scale)


def _chosen_paged(call: AttentionCall, keep: float, page_size: int) -> Tensor:
    from replay.kernels.triton.token_choice import choose_paged_tokens

    cache, starts = paged(call.key, call.value, call.attn_mask, page_size)
    indices = choose_paged_tokens(
        call.query, cache.key_pages, cache.block_table, cache.lengths, keep, scale=call.scale
    )
    if starts is not None:
        moved = indices + starts[:, None, None].to(indices.dtype)
        indices = torch.where(indices < 0, indices, moved)
    return mask_of_tokens(indices, call)


def _check_keep(keep: float) -> None:
    if not 0 < keep <= 1:
        raise ValueError(f"a share of the keys is more than 0 and at most 1, not {keep}")


def _sparse_kernel(keep: float = DEFAULT_KEEP) -> Kernel:
    _check_keep(keep)
    return Kernel(
        "triton-sparse-decode",
        partial(_attend, keep=keep),
        accuracy_class="sparse",
        unavailable=triton_unavailable,
        unsupported=all_of(*DECODE_LIMITS, no_causal, padding_mask_only),
        prepare=partial(_prepare, keep=keep),
        default=False,
        about=f"ours: decode in Triton with the highest-scoring {keep:.3g} of the keys",
        library="triton",
        install=TRITON_INSTALL,
        chosen=partial(_chosen, keep=keep),
        options=_sparse_kernel,
    )


def _paged_sparse_kernel(keep: float = DEFAULT_KEEP, page_size: int = DEFAULT_PAGE_SIZE) -> Kernel:
    _check_keep(keep)
    check_page_size(page_size)
    return Kernel(
        "triton-paged-sparse-decode",
        partial(_attend_paged, keep=keep, page_size=page_size),
        accuracy_class="sparse",
        unavailable=triton_unavailable,
        unsupported=all_of(*DECODE_LIMITS, no_causal, padding_mask_only),
        prepare=partial(_prepare_paged, keep=keep, page_size=page_size),
        default=False,
        about=f"ours: the same over shuffled pages of {page_size} keys",
        library="triton",
        install=TRITON_INSTALL,
        chosen=partial(_chosen_paged, keep=keep, page_size=page_size),
        options=_paged_sparse_kernel,
    )


register(_sparse_kernel())
register(_paged_sparse_kernel())
