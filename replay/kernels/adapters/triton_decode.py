"""Our Triton kernels for one or a few query tokens: keys in one piece, and keys in pages.

If the value is the first part of the key, as in DeepSeek's absorbed latent attention, the shared
part is read only once. A cache that was captured in pages is read in place, with packed queries
too. The paged kernel copies any other cache into pages in a random order. The kernel's drop-in time
includes this copy; its core time does not. The pages of a padded batch contain only the tokens that
the mask keeps visible. The option `page_size` follows the kernel's name, as in `[page_size=64]`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from capture.call.attention_call import AttentionCall
from capture.call.attention_variant import FEATURES, output_dtype
from capture.hooks.interceptor import Arguments
from replay.kernels import constraints as limits
from replay.kernels.constraints import AnyCall
from replay.kernels.kernel_options import kernel_options
from replay.kernels.layout import padding_keys
from replay.kernels.libraries import TRITON, imported
from replay.kernels.page_size import DEFAULT_PAGE_SIZE, check_page_size
from replay.kernels.pages import as_int32, prepare_batch, scale_of_keys
from replay.kernels.registry import Kernel, register
from replay.kernels.wrapping import adapt, at_once, register_adapted

if TYPE_CHECKING:
    from attention_kernels.decode.paging import PagedCache

MOST_ROWS = 32 * 65_535
"""Maximum number of query rows of a key head: a GPU launches at most 65,535 programs on the axis of
these rows, and a program has at least 32 of so many."""


def _fits_a_grid(call: AttentionCall) -> str | None:
    rows = call.shape.q_heads // call.shape.kv_heads * limits.longest_query(call)
    return None if rows <= MOST_ROWS else f"{rows} query rows of a key head: at most {MOST_ROWS}"


LATENT, TAIL = 512, 128
"""Maximum head dimension of a value that is the first part of its key (absorbed MLA), and of the
key's other part. In DeepSeek's models the dimensions are 512 and 64."""


def _head_dim(call: AttentionCall) -> str | None:
    if not call.value_is_in_key:
        return limits.max_head_dim(256)(call)
    latent, tail = call.shape.v_head_dim, call.shape.head_dim - call.shape.v_head_dim
    if latent <= LATENT and tail <= TAIL:
        return None
    return f"head_dim {latent} + {tail}: at most {LATENT} + {TAIL}"


def _limits(head_dim: limits.Constraint) -> tuple[limits.Constraint, ...]:
    return (
        limits.no_dropout,
        limits.or_scaled_pages(limits.half_precision),
        head_dim,
        limits.max_queries(16),
        _fits_a_grid,
        limits.no_huge_softcap,
    )


LIMITS, DECODE_LIMITS = _limits(_head_dim), _limits(limits.max_head_dim(256))


def _decode(call: Arguments) -> Tensor:
    return imported("attention_kernels.decode.contiguous_decode", "contiguous_decode")(
        call.query,
        call.key,
        call.value,
        call.attn_mask,
        call.is_causal,
        scale=call.scale,
        seqused_k=call.seqused_k,
        sinks=call.sinks,
        options=kernel_options(call.variant),
    )


def paged(call: AnyCall, page_size: int) -> tuple[PagedCache, Tensor | None]:
    """Return SDPA's key and value in pages, and the start of each sequence in its pages.

    The starts are None if every sequence starts at 0.
    """
    from attention_kernels.decode.paging import page

    keys = padding_keys(call)
    if keys is None:
        return page(call.key, call.value, page_size, lengths=call.seqused_k), None
    starts = keys.int().argmax(dim=1)
    lengths = keys.sum(dim=1)
    return page(call.key, call.value, page_size, lengths=lengths, starts=starts), starts


def _recorded_pages(call: AnyCall) -> PagedCache | None:
    """Return the call's own pages, if its keys are paged."""
    if call.page_table is None or call.seqused_k is None:
        return None
    from attention_kernels.decode.paging import PagedCache

    return PagedCache(
        call.key.transpose(1, 2),
        call.value.transpose(1, 2),
        as_int32(call.page_table),
        as_int32(call.seqused_k),
    )


def _mask_alone(call: AnyCall) -> str | None:
    """Refuse a mask with a diagonal, window or lengths, because a sequence in pages starts at 0."""
    diagonal = call.is_causal or call.variant.window != (None, None)
    if call.attn_mask is None or not (diagonal or call.seqused_k is not None):
        return None
    return "attn_mask beside a causal mask, a window or lengths of keys"


def _prepare_paged(call: AnyCall, page_size: int) -> Callable[[], Tensor]:
    if reason := _mask_alone(call):
        raise NotImplementedError(reason)
    if call.cu_seqlens_q is not None:
        return prepare_batch(call)
    paged_decode = imported("attention_kernels.decode.paged_decode", "paged_decode")
    cache = _recorded_pages(call) or paged(call, page_size)[0]
    dtype, key_scale = output_dtype(call), scale_of_keys(call)
    return lambda: paged_decode(
        call.query.to(dtype),
        *cache,
        scale=call.scale,
        key_scale=key_scale,
        value_scale=call.value_scale,
        is_causal=call.is_causal,
        sinks=call.sinks,
        options=kernel_options(call.variant),
    )


def _paged_kernel(page_size: int = DEFAULT_PAGE_SIZE) -> Kernel:
    check_page_size(page_size)
    prepare = partial(_prepare_paged, page_size=page_size)
    return adapt(
        "triton-paged-decode",
        TRITON,
        at_once(prepare),
        (*LIMITS, limits.padding_mask_only, limits.packed_in_pages_only, _mask_alone),
        f"ours: decode in Triton over shuffled pages of {page_size} keys",
        prepare=prepare,
        options=_paged_kernel,
        features=FEATURES.keys(),
    )


register_adapted(
    "triton-decode",
    TRITON,
    _decode,
    LIMITS,
    "ours: decode in Triton, the keys split among programs",
    features=FEATURES.keys() - {"packed", "paged", "scaled"},
    prefers_rewritten_mask=True,
)
register(_paged_kernel())
