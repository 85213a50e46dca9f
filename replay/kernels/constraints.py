"""Checks of a call; each returns a sentence if a kernel cannot run the call.

A kernel lists its limits. The first limit that a call does not meet is the reason in its row:

    limits=(no_dropout, no_mask, head_dims(64, 128), dtypes(torch.float16))

The limits protect a kernel from calls for which it would return a wrong output. In particular, an
argument of SDPA that the kernel lacks is refused, never ignored. The drop-in itself repeats the
checks in `ASKED_AT_EVERY_CALL`, and raises an error if one fails.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from capture.call.attention_call import AttentionCall
from capture.call.attention_variant import is_scaled
from capture.call.per_head import SCALES
from capture.call.strides import is_leading_part
from capture.hooks.interceptor import Arguments
from capture.storage.header import dtype_name

AnyCall = Arguments | AttentionCall
"""Call of SDPA, either live or from a recording; both classes name the arguments alike."""

Constraint = Callable[[AttentionCall], str | None]


def all_of(*constraints: Constraint) -> Constraint:
    """Combine constraints into one, which returns the sentence of the first unmet constraint."""

    def check(call: AttentionCall) -> str | None:
        return next(filter(None, (constraint(call) for constraint in constraints)), None)

    return check


def no_dropout(call: AnyCall) -> str | None:
    return "dropout makes the output random, so it cannot be judged" if call.dropout_p > 0 else None


def no_mask(call: AnyCall) -> str | None:
    return None if call.attn_mask is None else "takes no attn_mask"


def no_causal(call: AnyCall) -> str | None:
    return "takes no causal calls" if call.is_causal else None


def needs_causal(call: AnyCall) -> str | None:
    return None if call.is_causal else "for causal calls: this call is not causal"


def mask_or_causal(call: AnyCall) -> str | None:
    both = call.attn_mask is not None and call.is_causal
    return "takes no attn_mask in causal calls" if both else None


def bool_mask_only(call: AnyCall) -> str | None:
    mask = call.attn_mask
    if mask is None or mask.dtype == torch.bool:
        return None
    return f"takes a bool attn_mask only, not {dtype_name(mask.dtype)}"


def no_bool_mask(call: AnyCall) -> str | None:
    """Refuse bool masks, for kernels that add the mask to the scores."""
    mask = call.attn_mask
    return "takes no bool attn_mask" if mask is not None and mask.dtype == torch.bool else None


def mask_shared_by_heads(call: AnyCall) -> str | None:
    mask = call.attn_mask
    if mask is None or mask.ndim < 3 or mask.shape[-3] == 1 or mask.stride(-3) == 0:
        return None
    return "takes one attn_mask for all heads"


def causal_only_square(call: AnyCall) -> str | None:
    """Refuse causal calls aligned top left, for libraries that align bottom right.

    Such a call is allowed if it has as many queries as keys, because both alignments then agree.
    Comparing packed lengths waits for the GPU.
    """
    variant = call.variant
    if variant.bottom_right or not (call.is_causal or variant.window != (None, None)):
        return None
    what = "causal" if call.is_causal else "a window"
    if call.seqused_k is not None:
        lengths = "a number of valid keys per sequence"
    elif call.cu_seqlens_q is not None and call.cu_seqlens_k is not None:
        same = call.cu_seqlens_q is call.cu_seqlens_k
        if same or torch.equal(call.cu_seqlens_q, call.cu_seqlens_k):
            return None
        lengths = "packed queries and keys of other lengths"
    elif call.query.shape[2] == call.key.shape[2]:
        return None
    else:
        lengths = f"{call.query.shape[2]} queries and {call.key.shape[2]} keys"
    return f"{what} with {lengths}: the kernel aligns it bottom right, SDPA top left"


def window_only_square(call: AnyCall) -> str | None:
    """Apply `causal_only_square` to windows, for kernels that align only windows bottom right."""
    is_plain = call.variant.window == (None, None) and call.cu_seqlens_q is None
    return None if is_plain else causal_only_square(call)


def mask_alone(call: AnyCall) -> str | None:
    """Refuse a mask together with a window or lengths, for kernels that turn masks into lengths."""
    if call.attn_mask is None:
        return None
    if not {"window", "packed", "key-lengths"}.intersection(call.features):
        return None
    return "attn_mask together with a window or lengths of sequences"


def left_window_only(call: AnyCall) -> str | None:
    """Refuse windows with a limited right side, for kernels that limit only the left side."""
    _, right = call.variant.window
    if not right or call.is_causal:
        return None
    return f"a window to {right} keys after the query: supports none or all that follow"


def no_gqa(call: AttentionCall) -> str | None:
    q_heads, kv_heads = call.shape.q_heads, call.shape.kv_heads
    if q_heads == kv_heads:
        return None
    return f"{q_heads} query heads over {kv_heads} key heads: needs equal numbers"


def longest_query(call: AnyCall) -> int:
    """Return the number of queries of the longest sequence.

    Packed lengths whose maximum the caller does not give are read, which waits for the GPU.
    """
    longest = call.variant.max_seqlen_q
    if call.cu_seqlens_q is None:
        return call.query.shape[2]
    return int(call.cu_seqlens_q.diff().max()) if longest is None else longest


def max_queries(most: int) -> Constraint:
    """Limit the number of queries, for decode kernels; prefill kernels handle more queries."""
    allowed = "one query" if most == 1 else f"at most {most} queries"

    def check(call: AttentionCall) -> str | None:
        q_len = longest_query(call)
        return None if q_len <= most else f"decode only: {allowed} per sequence, not {q_len}"

    return check


decode_only = max_queries(1)


def decode_or_key_lengths(call: AttentionCall) -> str | None:
    """Allow several queries only together with key lengths, for kernels that read caches."""
    return None if call.seqused_k is not None else decode_only(call)


def page_size_multiple_of(divisor: int) -> Constraint:
    def check(call: AttentionCall) -> str | None:
        page_size = call.key.shape[2]
        if call.page_table is None or page_size % divisor == 0:
            return None
        return f"pages of {page_size} keys: needs a multiple of {divisor}"

    return check


def page_size_of(only: int) -> Constraint:
    def check(call: AttentionCall) -> str | None:
        page_size = call.key.shape[2]
        return None if page_size == only else f"pages of {page_size} keys: needs {only}"

    return check


def needs_pages(call: AnyCall) -> str | None:
    """Require a page table, for kernels that read keys only through a page table."""
    return None if call.page_table is not None else "for keys in pages: this call has no page table"


def value_in_key(call: AnyCall) -> str | None:
    """Require that the value is the key's first columns, for kernels of absorbed MLA."""
    shares = is_leading_part(call.value, call.key)
    return None if shares else "for absorbed MLA: the value is not part of this call's key"


def packed_in_pages_only(call: AnyCall) -> str | None:
    """Require paged keys if queries are packed, for kernels that cannot read packed keys."""
    if call.cu_seqlens_q is None or call.page_table is not None:
        return None
    return "packed sequences without pages of keys"


def default_scale(call: AnyCall) -> str | None:
    default = call.query.shape[-1] ** -0.5
    if call.scale is None or abs(call.scale - default) <= 1e-6 * default:
        return None
    return f"takes no scale: always 1/sqrt(head_dim), not {call.scale:g}"


MOST_SOFTCAP = 2.0**14


def no_huge_softcap(call: AnyCall) -> str | None:
    """Refuse a huge soft cap in 16 bits.

    The kernels compute tanh with an error of float32's rounding of the cap, which is too large for
    scores that are a millionth of the cap.
    """
    cap = call.variant.softcap
    if cap is None or cap <= MOST_SOFTCAP or call.query.dtype == torch.float32:
        return None
    return f"soft cap {cap:g}: at most {MOST_SOFTCAP:g} in 16 bits"


def no_negative_scale(call: AttentionCall) -> str | None:
    scale = call.softmax_scale
    return None if scale >= 0 else f"scale {scale:g}: must not be negative"


def same_value_dim(call: AttentionCall) -> str | None:
    head_dim, v_head_dim = call.shape.head_dim, call.shape.v_head_dim
    if head_dim == v_head_dim:
        return None
    return f"value head_dim {v_head_dim} differs from query head_dim {head_dim}"


def deepseek_value_dim(call: AttentionCall) -> str | None:
    """Allow narrower values only in DeepSeek's prefill."""
    dims = call.shape.head_dim, call.shape.v_head_dim
    return None if dims == (192, 128) else same_value_dim(call)


def bfloat16_sinks(call: AnyCall) -> str | None:
    if call.sinks is None or call.sinks.dtype == torch.bfloat16:
        return None
    return f"takes bfloat16 sinks only, not {dtype_name(call.sinks.dtype)}"


def adjacent_elements(call: AttentionCall) -> str | None:
    """Require a last stride of 1, for kernels that refuse other strides; most adapters copy."""
    for name in ("query", "key", "value"):
        stride = getattr(call, name).stride(-1)
        if stride != 1:
            return f"the elements of a head lie {stride} apart in the {name}: must be adjacent"
    return None


def _listed(names: list[str]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}" if len(names) > 1 else names[0]


def head_dims(*allowed: int) -> Constraint:
    """Allow only these head dimensions."""
    listed = _listed([str(dim) for dim in allowed])

    def check(call: AttentionCall) -> str | None:
        head_dim = call.shape.head_dim
        return None if head_dim in allowed else f"head_dim {head_dim}: needs {listed}"

    return check


def max_head_dim(largest: int) -> Constraint:
    def check(call: AttentionCall) -> str | None:
        head_dim = max(call.shape.head_dim, call.shape.v_head_dim)
        return None if head_dim <= largest else f"head_dim {head_dim}: at most {largest}"

    return check


def head_dim_multiple_of(divisor: int) -> Constraint:
    def check(call: AttentionCall) -> str | None:
        for head_dim in (call.shape.head_dim, call.shape.v_head_dim):
            if head_dim % divisor:
                return f"head_dim {head_dim}: needs a multiple of {divisor}"
        return None

    return check


multiple_of_8 = head_dim_multiple_of(8)


def min_length(least: int) -> Constraint:
    """Require queries and keys of at least this length."""

    def check(call: AttentionCall) -> str | None:
        shortest = min(call.shape.q_len, call.shape.kv_len)
        return None if shortest >= least else f"length {shortest}: at least {least}"

    return check


def dtypes(*allowed: torch.dtype) -> Constraint:
    listed = _listed([dtype_name(dtype) for dtype in allowed])

    def check(call: AttentionCall) -> str | None:
        dtype = call.query.dtype
        if not (call.key.dtype == dtype == call.value.dtype):
            given = (dtype_name(each.dtype) for each in (call.query, call.key, call.value))
            return f"query, key and value in {', '.join(given)}: needs one dtype"
        if dtype in allowed:
            return None
        return f"dtype {dtype_name(dtype)}: needs {listed}"

    return check


half_precision = dtypes(torch.float16, torch.bfloat16)
up_to_float32 = dtypes(torch.float16, torch.bfloat16, torch.float32)


def needs_scales(call: AnyCall) -> str | None:
    given = [getattr(call, name) for name in SCALES.values()]
    return "needs a scale of query, key and value" if None in given else None


def or_scaled_pages(usual: Constraint) -> Constraint:
    """Allow, beside the usual dtypes, pages of scaled float8_e4m3fn; the queries have 16 bits, or
    are scaled too."""

    def check(call: AttentionCall) -> str | None:
        if not is_scaled(call):
            return usual(call)
        if call.page_table is None:
            return "scaled 8-bit values outside pages"
        if odd := {call.key.dtype, call.value.dtype} - {torch.float8_e4m3fn}:
            return f"a cache in {dtype_name(odd.pop())}"
        allowed: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16)
        if call.query_scale is not None:
            if call.key_scale is None:
                return "scaled queries over keys without scale"
            allowed = (torch.float8_e4m3fn,)
        dtype = call.query.dtype
        if dtype in allowed:
            return None
        return f"queries in {dtype_name(dtype)} over a cache in 8 bits"

    return check


class KeyRange(NamedTuple):
    """Keys of each batch element that a padding mask keeps visible."""

    lengths: Tensor
    """Numbers of keys: (B,) int32."""
    starts: Tensor
    """Indices of the first keys: (B,) int32; all 0 if the padding is at the end."""
    keys: Tensor
    """Visible keys: (B, Sk), bool."""


def key_range(attn_mask: Tensor, batch: int, kv_len: int) -> KeyRange | None:
    """Return the keys that a padding mask keeps visible; None if the mask is of another kind.

    A padding mask is bool and equal for all heads and queries. For each batch element it keeps one
    contiguous range of keys visible, which is not empty and touches the beginning or the end.
    """
    if attn_mask.dtype != torch.bool or attn_mask.ndim > 4:
        return None
    mask = attn_mask[(None,) * (4 - attn_mask.ndim)]
    first = mask[:, :1, :1]
    if not bool((mask == first).all()):
        return None
    keys = first[:, 0, 0].expand(batch, kv_len)
    lengths = keys.sum(dim=1)
    position = torch.arange(kv_len, device=mask.device)
    at_start = keys == (position < lengths[:, None])
    at_end = keys == (position >= kv_len - lengths[:, None])
    starts_at_zero = at_start.all(dim=1)
    if not bool(((starts_at_zero | at_end.all(dim=1)) & (lengths > 0)).all()):
        return None
    starts = torch.where(starts_at_zero, 0, kv_len - lengths)
    return KeyRange(lengths.to(torch.int32), starts.to(torch.int32), keys)


def padding_mask_only(call: AttentionCall) -> str | None:
    """Refuse masks for which `key_range` returns None."""
    mask, shape = call.attn_mask, call.shape
    if mask is None or key_range(mask, shape.batch, shape.kv_len) is not None:
        return None
    if mask.dtype != torch.bool:
        return f"takes a bool padding mask only, not {dtype_name(mask.dtype)}"
    return (
        "takes a padding mask only: the same for all heads and queries, and "
        "masking keys before or after the others"
    )


def needs_mask(call: AnyCall) -> str | None:
    """Require a mask, because without one a variable-length kernel equals the plain kernel."""
    return None if call.attn_mask is not None else "for padded batches: this call has no attn_mask"


def needs_lengths(call: AnyCall) -> str | None:
    """Require a mask or lengths, for kernels of padded and packed batches and of key lengths."""
    given = (call.attn_mask, call.cu_seqlens_q, call.seqused_k)
    if all(each is None for each in given):
        return "for sequences of different lengths: this call has no attn_mask, and is not packed"
    return None


LATENT_DIM = 512
"""Head dimension of the value in absorbed MLA of DeepSeek's models."""


def _latent_dim(call: AnyCall) -> str | None:
    found = call.value.shape[-1]
    return None if found == LATENT_DIM else f"value head_dim {found}: needs {LATENT_DIM}"


ABSORBED_MLA: tuple[Constraint, ...] = (
    no_dropout,
    no_mask,
    half_precision,
    value_in_key,
    _latent_dim,
    causal_only_square,
)
"""Limits of kernels for absorbed MLA, apart from the key's head dimension."""

PADDED_OR_PACKED: tuple[Constraint, ...] = (
    mask_or_causal,
    mask_alone,
    needs_lengths,
    padding_mask_only,
    causal_only_square,
)
"""Limits of kernels for packed sequences that align causal masks bottom right."""

ASKED_AT_EVERY_CALL: tuple[Callable[[AnyCall], str | None], ...] = (
    no_dropout,
    no_mask,
    needs_mask,
    needs_lengths,
    mask_or_causal,
    bool_mask_only,
    mask_shared_by_heads,
    no_causal,
    needs_causal,
    mask_alone,
    causal_only_square,
    window_only_square,
    left_window_only,
    packed_in_pages_only,
    needs_pages,
    value_in_key,
    default_scale,
    no_huge_softcap,
)
"""Checks for arguments that a kernel would ignore or misread; no check reads values of tensors."""
