"""Our Triton kernels for one or a few query tokens: keys in one piece, and keys in pages.

A captured cache is in one piece. The paged kernel first copies it into pages in a random order,
which its drop-in counts and its core does not, where the pages are there already. A padded batch
has as many tokens in its pages as its mask leaves. `page_size` is an option: `--page-size 64`, or
the kernel's name with `[page_size=64]`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from capture.call import AttentionCall
from replay.kernels.constraints import (
    Constraint,
    all_of,
    half_precision,
    max_head_dim,
    no_causal,
    no_dropout,
    padding_mask_only,
)
from replay.kernels.layout import padding_keys, refuse
from replay.kernels.library import TRITON_INSTALL, triton_unavailable
from replay.kernels.pages import DEFAULT_PAGE_SIZE, check_page_size
from replay.kernels.registry import Attention, Kernel, register

if TYPE_CHECKING:
    from replay.kernels.triton.paging import PagedCache

MAXIMUM_QUERIES = 16
"""With more, a prefill kernel is the one to compare."""


def few_queries(call: AttentionCall) -> str | None:
    q_len = call.shape.q_len
    if q_len <= MAXIMUM_QUERIES:
        return None
    return f"decode only: at most {MAXIMUM_QUERIES} queries per sequence, not {q_len}"


DECODE_LIMITS: tuple[Constraint, ...] = (
    no_dropout,
    half_precision,
    max_head_dim(256),
    few_queries,
)


def decode(
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
    from replay.kernels.triton import decode

    refuse(None, dropout_p)
    return decode.decode(query, key, value, attn_mask, is_causal, scale=scale)


def paged(
    key: Tensor, value: Tensor, attn_mask: Tensor | None, page_size: int
) -> tuple[PagedCache, Tensor | None]:
    """SDPA's key and value in pages, and where each sequence began in them; None for at 0."""
    from replay.kernels.triton.paging import page

    if attn_mask is None:
        return page(key, value, page_size), None
    keys = padding_keys(attn_mask, key.shape[0], key.shape[2])
    starts = keys.int().argmax(dim=1)
    return page(key, value, page_size, lengths=keys.sum(dim=1), starts=starts), starts


def _paged_decode(page_size: int) -> Attention:
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
        from replay.kernels.triton.paged_decode import paged_decode

        refuse(None, dropout_p)
        cache, _ = paged(key, value, attn_mask, page_size)
        return paged_decode(query, *cache, scale=scale)

    return attention


def _prepare_paged(call: AttentionCall, page_size: int) -> Callable[[], Tensor]:
    from replay.kernels.triton.paged_decode import paged_decode

    cache, _ = paged(call.key, call.value, call.attn_mask, page_size)
    return lambda: paged_decode(call.query, *cache, scale=call.scale)


def _paged_kernel(page_size: int = DEFAULT_PAGE_SIZE) -> Kernel:
    check_page_size(page_size)
    return Kernel(
        "triton-paged-decode",
        _paged_decode(page_size),
        unavailable=triton_unavailable,
        unsupported=all_of(*DECODE_LIMITS, no_causal, padding_mask_only),
        prepare=partial(_prepare_paged, page_size=page_size),
        about=f"ours: decode in Triton over shuffled pages of {page_size} keys",
        library="triton",
        install=TRITON_INSTALL,
        options=_paged_kernel,
    )


register(
    Kernel(
        "triton-decode",
        decode,
        unavailable=triton_unavailable,
        unsupported=all_of(*DECODE_LIMITS),
        about="ours: decode in Triton, the keys split among programs",
        library="triton",
        install=TRITON_INSTALL,
    )
)
register(_paged_kernel())
