"""Our Triton kernels that decode with a share of the keys: in one piece, and in pages.

The drop-in chooses tokens and attends to them. The core attends to given tokens, as in a model with
a cheap way of choosing. The highest-scoring keys of each key head are chosen
(`attention_kernels/sparse/token_choice.py`). Scoring reads every key, so the drop-in cannot be much
faster than attention to all keys. No other choice of equally many keys would have a smaller error.
Options are `keep`, the share of keys kept, and `page_size`, as in
`triton-sparse-decode[keep=0.05]`.

These kernels do not run by default, because users must decide which tokens may be left out.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from capture.call.attention_call import AttentionCall
from replay.kernels.adapters.triton_decode import DECODE_LIMITS, paged
from replay.kernels.chosen_keys import mask_of_tokens
from replay.kernels.constraints import AnyCall, no_causal, padding_mask_only
from replay.kernels.layout import padding_keys
from replay.kernels.libraries import TRITON, imported
from replay.kernels.page_size import DEFAULT_PAGE_SIZE, check_page_size
from replay.kernels.registry import Kernel, register
from replay.kernels.wrapping import adapt, at_once

if TYPE_CHECKING:
    from attention_kernels.decode.paging import PagedCache

DEFAULT_KEEP = 0.02
LIMITS = (*DECODE_LIMITS, no_causal, padding_mask_only)


def _choose(call: AnyCall, keep: float) -> Tensor:
    """Return the chosen tokens, (B, Hkv, K) int64."""
    choose_tokens = imported("attention_kernels.sparse.token_choice", "choose_tokens")
    return choose_tokens(call.query, call.key, keep, allowed=padding_keys(call), scale=call.scale)


def _prepare(call: AnyCall, keep: float) -> Callable[[], Tensor]:
    sparse_decode = imported("attention_kernels.sparse.sparse_decode", "sparse_decode")
    indices = _choose(call, keep)
    return lambda: sparse_decode(call.query, call.key, call.value, indices, scale=call.scale)


def _chosen(call: AttentionCall, keep: float) -> Tensor:
    return mask_of_tokens(_choose(call, keep), call)


def _choose_paged(call: AnyCall, cache: PagedCache, keep: float) -> Tensor:
    """Return the chosen tokens, (B, Hkv, K) int64, as positions in each sequence's pages."""
    from attention_kernels.sparse.token_choice import choose_paged_tokens

    return choose_paged_tokens(
        call.query, cache.key_pages, cache.block_table, cache.lengths, keep, scale=call.scale
    )


def _prepare_paged(call: AnyCall, keep: float, page_size: int) -> Callable[[], Tensor]:
    from attention_kernels.sparse.sparse_decode import paged_sparse_decode

    cache, _ = paged(call, page_size)
    indices = _choose_paged(call, cache, keep)
    return lambda: paged_sparse_decode(call.query, *cache, indices, scale=call.scale)


def _chosen_paged(call: AttentionCall, keep: float, page_size: int) -> Tensor:
    cache, starts = paged(call, page_size)
    indices = _choose_paged(call, cache, keep)
    if starts is not None:
        moved = indices + starts[:, None, None].to(indices.dtype)
        indices = torch.where(indices < 0, indices, moved)
    return mask_of_tokens(indices, call)


def _check_keep(keep: float) -> None:
    if not 0 < keep <= 1:
        raise ValueError(f"keep must be more than 0 and at most 1, got {keep:g}")


def _sparse_kernel(keep: float = DEFAULT_KEEP) -> Kernel:
    _check_keep(keep)
    prepare = partial(_prepare, keep=keep)
    return adapt(
        "triton-sparse-decode",
        TRITON,
        at_once(prepare),
        LIMITS,
        f"ours: decode in Triton with the highest-scoring {keep:.3g} of the keys",
        prepare=prepare,
        accuracy_class="sparse",
        default=False,
        chosen=partial(_chosen, keep=keep),
        options=_sparse_kernel,
    )


def _paged_sparse_kernel(keep: float = DEFAULT_KEEP, page_size: int = DEFAULT_PAGE_SIZE) -> Kernel:
    _check_keep(keep)
    check_page_size(page_size)
    prepare = partial(_prepare_paged, keep=keep, page_size=page_size)
    return adapt(
        "triton-paged-sparse-decode",
        TRITON,
        at_once(prepare),
        LIMITS,
        f"ours: the same over shuffled pages of {page_size} keys",
        prepare=prepare,
        accuracy_class="sparse",
        default=False,
        chosen=partial(_chosen_paged, keep=keep, page_size=page_size),
        options=_paged_sparse_kernel,
    )


register(_sparse_kernel())
register(_paged_sparse_kernel())
