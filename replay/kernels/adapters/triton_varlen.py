"""Our Triton kernel for sequences of different lengths, which reads only visible keys, in place.

The visible keys are determined by the mask in a padded batch, by the sequences in a packed batch,
and by `seqused_k` in a cache, whose keys may lie in pages. Nothing is copied. The lengths are
computed on the GPU, so the host does not wait. The core gets known lengths, as all layers of a
model except the first do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from capture.call.attention_variant import FEATURES
from replay.kernels import constraints as limits
from replay.kernels.constraints import AnyCall
from replay.kernels.kernel_options import kernel_options
from replay.kernels.layout import padding_keys
from replay.kernels.libraries import TRITON, imported
from replay.kernels.pages import prepare_batch
from replay.kernels.wrapping import at_once, register_adapted


def _mask_and_lengths(call: AnyCall) -> str | None:
    """Refuse a mask with lengths, because the diagonal of a padded batch depends on its padding."""
    if call.attn_mask is None:
        return None
    if not {"bottom-right", "packed", "key-lengths"}.intersection(call.features):
        return None
    return "attn_mask beside lengths of sequences or a bottom-right diagonal"


def _prepare(call: AnyCall) -> Callable[[], Tensor]:
    if reason := _mask_and_lengths(call):
        raise NotImplementedError(reason)
    if call.page_table is not None:
        return prepare_batch(call)
    if call.cu_seqlens_q is not None:
        return _prepare_packed(call)
    from attention_kernels.portable import varlen

    options = kernel_options(call.variant)
    if call.seqused_k is not None:
        ranges = varlen.KeyRanges(None, call.seqused_k)
    else:
        keys = padding_keys(call)
        assert keys is not None, "`needs_lengths` has seen to it"
        ranges = varlen.key_ranges(keys)
        if options.bottom_right:  # no effect here: `_mask_and_lengths` refuses other calls
            options = replace(options, bottom_right=False)
    return lambda: varlen.padded_prefill(
        call.query,
        call.key,
        call.value,
        ranges,
        call.is_causal,
        scale=call.scale,
        sinks=call.sinks,
        options=options,
    )


def _prepare_packed(call: AnyCall) -> Callable[[], Tensor]:
    packed = imported("attention_kernels.portable.varlen", "packed_prefill")
    cu_seqlens_q, cu_seqlens_k = call.cu_seqlens_q, call.cu_seqlens_k
    assert cu_seqlens_q is not None
    assert cu_seqlens_k is not None
    longest = limits.longest_query(call)
    query, key, value = (each[0].transpose(0, 1) for each in (call.query, call.key, call.value))

    def run() -> Tensor:
        output_THD = packed(
            query,
            key,
            value,
            cu_seqlens_q,
            cu_seqlens_k,
            longest,
            call.is_causal,
            scale=call.scale,
            seqused_k=call.seqused_k,
            sinks=call.sinks,
            options=kernel_options(call.variant),
        )
        return output_THD.transpose(0, 1)[None]

    return run


register_adapted(
    "triton-varlen",
    TRITON,
    at_once(_prepare),
    (
        limits.no_dropout,
        limits.or_scaled_pages(limits.up_to_float32),
        limits.max_head_dim(256),
        limits.no_huge_softcap,
        limits.needs_lengths,
        limits.padding_mask_only,
        _mask_and_lengths,
    ),
    "ours: padded and packed batches in Triton, padding neither read nor computed",
    prepare=_prepare,
    features=FEATURES.keys(),
)
