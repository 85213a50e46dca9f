"""FlashInfer (`flashinfer-python`): prefill with its FA2 and FA3 kernels, paged decode, and MLA.

The library's tensors are (S, H, D), without a batch dimension. A batch of one goes through
`single_prefill_with_kv_cache`. A larger batch is concatenated for
`BatchPrefillWithRaggedKVCacheWrapper`, whose `plan` distributes the work and whose `run` performs
it. The drop-in includes `plan` and `run`, as for a single call. The core is `run` only, as for the
later layers of a model, which share one plan. Decode goes through
`BatchDecodeWithPagedKVCacheWrapper`, and absorbed MLA over pages through
`BatchMLAPagedAttentionWrapper`. Recorded pages are read in place. Other keys and values are first
copied into pages; the drop-in includes this copy, the core does not.

The FA2 kernels take a bool mask shared by all heads, unless there is a window; FA3 takes no mask.
Causal masks and windows are aligned bottom right; windows reach to the left only. Packed sequences
go through the ragged wrapper unchanged; decode takes key lengths. Sinks need a wrapper over pages
that this adapter does not use. The library compiles each kind of call (nvcc, ninja) at first use.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from capture.call.attention_call import AttentionCall
from capture.hooks.interceptor import Arguments
from replay.kernels import constraints as limits
from replay.kernels.constraints import AnyCall
from replay.kernels.layout import Packed, bshd, even_offsets, in_layout, thd, unit_stride
from replay.kernels.libraries import Library
from replay.kernels.page_size import DEFAULT_PAGE_SIZE, check_page_size
from replay.kernels.registry import Kernel, register
from replay.kernels.wrapping import adapt, at_once, register_adapted

LIBRARY = Library(
    module="flashinfer",
    package="flashinfer-python",
    install="pip install flashinfer-python",
    functions=(
        "single_prefill_with_kv_cache",
        "BatchPrefillWithRaggedKVCacheWrapper",
        "BatchDecodeWithPagedKVCacheWrapper",
    ),
)

WORKSPACE_BYTES = 128 * 2**20
"""Size of a workspace that FlashInfer recommends."""

LIMITS = (
    limits.no_dropout,
    limits.half_precision,
    limits.same_value_dim,
    limits.head_dims(64, 128, 256),
)


_KNOWN = ("bottom-right", "window", "softcap")


def _queries_within_keys(call: AnyCall) -> str | None:
    """Refuse bottom-right causal calls with more queries than keys, as FlashInfer does."""
    q_len, kv_len = call.query.shape[2], call.key.shape[2]
    if call.cu_seqlens_q is not None or q_len <= kv_len or not options(call)["causal"]:
        return None
    return f"causal with more queries ({q_len}) than keys ({kv_len})"


@functools.lru_cache(maxsize=4)
def _workspace(name: str, device: torch.device) -> Tensor:
    # The decode wrapper expects zeros at first use, so it cannot share prefill's memory.
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


def new_wrapper(name: str, device: torch.device, **options: Any) -> Any:
    return getattr(LIBRARY.load(), name)(_workspace(name, device), kv_layout="NHD", **options)


@functools.lru_cache(maxsize=8)
def shared_wrapper(name: str, device: torch.device, masked: bool, **options: Any) -> Any:
    """Return a wrapper that drop-in calls share, as a model's layers do.

    Masked calls have their own wrapper, because a wrapper that has planned with a mask keeps
    applying it.
    """
    return new_wrapper(name, device, **options)


def _whole_mask(call: AnyCall) -> Tensor | None:
    """Return a mask with one broadcast head as (B, Sq, Sk), bool."""
    if call.attn_mask is None:
        return None
    mask = call.attn_mask[(None,) * (4 - call.attn_mask.ndim)]
    return mask[:, 0].expand(call.query.shape[0], call.query.shape[2], call.key.shape[2])


def options(call: AnyCall) -> dict[str, Any]:
    """Return the arguments common to `plan` and the function for one sequence."""
    left, right = call.variant.window
    found: dict[str, Any] = {"causal": call.is_causal or right == 0, "sm_scale": call.scale}
    return found | _window_and_cap(left, call.variant.softcap)


def _window_and_cap(left: int | None, softcap: float | None) -> dict[str, Any]:
    found: dict[str, Any] = {} if left is None else {"window_left": left}
    return found if softcap is None else {**found, "logits_soft_cap": softcap}


def _single(call: Arguments, backend: str, **mask: Tensor) -> Tensor:
    """Run one sequence, whose tensors are (S, H, D)."""
    output = LIBRARY.load().single_prefill_with_kv_cache(
        call.query, call.key, call.value, kv_layout="NHD", backend=backend, **options(call), **mask
    )
    return output.transpose(0, 1)[None]


def _plan(wrapper: Any, call: AnyCall, packed: Packed | None) -> None:
    """Plan a ragged prefill."""
    (batch, heads, q_len, head_dim), (_, kv_heads, kv_len, _) = call.query.shape, call.key.shape
    mask = _whole_mask(call)
    device = call.query.device
    wrapper.plan(
        even_offsets(batch, q_len, device) if packed is None else packed.q_offsets,
        even_offsets(batch, kv_len, device) if packed is None else packed.k_offsets,
        heads,
        kv_heads,
        head_dim,
        q_data_type=call.query.dtype,
        **options(call),
        **({} if mask is None else {"custom_mask": mask.flatten()}),
    )


def _unflat(output: Tensor, batch: int) -> Tensor:
    return output.unflatten(0, (batch, -1)).transpose(1, 2)


RAGGED = "BatchPrefillWithRaggedKVCacheWrapper"


def _packed(call: AnyCall) -> Packed | None:
    return None if call.cu_seqlens_q is None else Packed.of(call)


def _prefill(call: Arguments, backend: str) -> Tensor:
    batch, flat, packed = call.query.shape[0], in_layout(call, thd), _packed(call)
    if batch > 1 or packed is not None:
        wrapper = shared_wrapper(
            RAGGED, call.query.device, call.attn_mask is not None, backend=backend
        )
        _plan(wrapper, call, packed)
        return _unflat(wrapper.run(flat.query, flat.key, flat.value), batch)
    mask = _whole_mask(call)
    return _single(flat, backend, **({} if mask is None else {"custom_mask": mask[0]}))


def _prepare_prefill(call: AttentionCall, backend: str) -> Callable[[], Tensor]:
    flat, packed = in_layout(call, lambda each: thd(each).contiguous()), _packed(call)
    batch = call.shape.batch
    if batch > 1 or packed is not None:
        wrapper = new_wrapper(RAGGED, call.device, backend=backend)
        _plan(wrapper, call, packed)
        return lambda: _unflat(wrapper.run(flat.query, flat.key, flat.value), batch)
    mask = _whole_mask(call)
    if mask is None:
        return lambda: _single(flat, backend)
    bits = LIBRARY.load().packbits(mask.contiguous().flatten(), bitorder="little")
    return lambda: _single(flat, backend, packed_custom_mask=bits)


def _paged(tensor_BHSD: Tensor, page_size: int) -> Tensor:
    """Return pages (pages, page_size, H, D), consecutive for each batch element, padded with zeros.

    The padding is never read, because the wrapper gets the length of the last page.
    """
    batch, heads, length, head_dim = tensor_BHSD.shape
    pages = -(-length // page_size)
    cache = tensor_BHSD.new_zeros(batch, pages * page_size, heads, head_dim)
    cache[:, :length] = tensor_BHSD.transpose(1, 2)
    return cache.view(batch * pages, page_size, heads, head_dim)


DECODE = "BatchDecodeWithPagedKVCacheWrapper"


class Pages(NamedTuple):
    """The pages of all sequences, one sequence after the other."""

    offsets: Tensor
    """Starts of the sequences in `numbers`, (B + 1,) int32."""
    numbers: Tensor
    lengths: Tensor
    """Number of keys of each sequence, (B,) int32."""
    page_size: int

    @property
    def last_lengths(self) -> Tensor:
        """Number of keys in the last page of each sequence, (B,) int32."""
        return self.lengths - (self.offsets.diff() - 1) * self.page_size

    @classmethod
    def of(cls, call: AnyCall, page_size: int) -> Pages:
        """Return a call's own pages, or the pages of `page_size` keys that `_paged` makes."""
        batch, length = call.query.shape[0], call.key.shape[2]
        device, lengths, table = call.query.device, call.seqused_k, call.page_table
        if table is not None:
            page_size = length
        else:
            count = -(-length // page_size)
            table = torch.arange(batch * count, dtype=torch.int32, device=device).view(batch, count)
        if lengths is None:
            lengths = torch.full((batch,), length, dtype=torch.int32, device=device)
        counts = (lengths + page_size - 1) // page_size
        is_used = torch.arange(table.shape[1], device=device) < counts[:, None]
        offsets = torch.nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
        return cls(offsets, table[is_used], lengths, page_size)


def _plan_decode(wrapper: Any, call: AnyCall, page_size: int) -> None:
    pages = Pages.of(call, page_size)
    wrapper.plan(
        pages.offsets,
        pages.numbers,
        pages.last_lengths,
        call.query.shape[1],
        call.key.shape[1],
        call.query.shape[3],
        pages.page_size,
        q_data_type=call.query.dtype,
        kv_data_type=call.key.dtype,
        sm_scale=call.scale,
        **_window_and_cap(call.variant.window[0], call.variant.softcap),
    )


def _cache(call: AnyCall, page_size: int) -> tuple[Tensor, Tensor]:
    """Return key and value as (pages, page_size, H, D)."""
    if call.page_table is not None:
        return bshd(call.key), bshd(call.value)
    return _paged(call.key, page_size), _paged(call.value, page_size)


def _tensor_cores(call: AnyCall) -> bool:
    """Return True to use tensor cores, as FlashInfer recommends for groups of 4 or more heads."""
    return call.query.shape[1] >= 4 * call.key.shape[1]


def _decode(call: Arguments, page_size: int) -> Tensor:
    """Run paged decode, including the copy into pages and the plan."""
    wrapper = shared_wrapper(DECODE, call.query.device, False, use_tensor_cores=_tensor_cores(call))
    _plan_decode(wrapper, call, page_size)
    return wrapper.run(unit_stride(call.query)[:, :, 0], _cache(call, page_size))[:, :, None]


def _prepare_decode(call: AttentionCall, page_size: int) -> Callable[[], Tensor]:
    wrapper = new_wrapper(DECODE, call.device, use_tensor_cores=_tensor_cores(call))
    _plan_decode(wrapper, call, page_size)
    query, cache = call.query[:, :, 0].contiguous(), _cache(call, page_size)
    return lambda: wrapper.run(query, cache)[:, :, None]


def _prepare_latent(call: AnyCall) -> Callable[[], Tensor]:
    """Plan absorbed MLA; the value's columns of query and key come before the others."""
    name, device, dtype = "BatchMLAPagedAttentionWrapper", call.query.device, call.query.dtype
    wrapper = getattr(LIBRARY.load(), name)(_workspace(name, device))
    batch, heads, _, head_dim = call.query.shape
    parts = limits.LATENT_DIM, head_dim - limits.LATENT_DIM
    pages = Pages.of(call, 0)
    wrapper.plan(
        even_offsets(batch, 1, device),
        *pages[:3],
        heads,
        *parts,
        pages.page_size,
        False,  # not causal: a single query sees all keys
        head_dim**-0.5 if call.scale is None else call.scale,
        dtype,
        dtype,
    )
    queries = [each.contiguous() for each in call.query[:, :, 0].split(parts, dim=2)]
    keys = call.key[:, 0].split(parts, dim=2)
    return lambda: wrapper.run(*queries, *keys)[:, :, None]


for _backend, _library, _mask in (
    ("fa2", LIBRARY, (limits.bool_mask_only, limits.mask_shared_by_heads)),
    (
        "fa3",
        replace(LIBRARY, runs_on=lambda capability: capability == (9, 0), needs="9.0"),
        (limits.no_mask,),
    ),
):
    register_adapted(
        f"flashinfer-{_backend}",
        _library,
        partial(_prefill, backend=_backend),
        (
            *LIMITS,
            limits.mask_or_causal,
            *_mask,
            limits.mask_alone,
            limits.causal_only_square,
            limits.left_window_only,
            _queries_within_keys,
        ),
        f"FlashInfer's {_backend.upper()} prefill",
        prepare=partial(_prepare_prefill, backend=_backend),
        features=(*_KNOWN, "packed"),
        prefers_rewritten_mask=True,
    )


def _decode_kernel(page_size: int = DEFAULT_PAGE_SIZE) -> Kernel:
    check_page_size(page_size)
    return adapt(
        "flashinfer-decode",
        LIBRARY,
        partial(_decode, page_size=page_size),
        (
            *LIMITS,
            limits.decode_only,
            limits.no_mask,
            limits.causal_only_square,
            limits.left_window_only,
        ),
        f"FlashInfer's decode over a cache of pages of {page_size} keys",
        prepare=partial(_prepare_decode, page_size=page_size),
        options=_decode_kernel,
        features=(*_KNOWN, "key-lengths", "paged"),
        packed_decode=True,
    )


register(_decode_kernel())
register_adapted(
    "flashinfer-mla",
    replace(LIBRARY, functions=("BatchMLAPagedAttentionWrapper",)),
    at_once(_prepare_latent),
    (limits.head_dims(576), limits.needs_pages, limits.decode_only, *limits.ABSORBED_MLA),
    "FlashInfer's decode with absorbed latent attention over pages",
    prepare=_prepare_latent,
    features=("bottom-right", "paged"),
    packed_decode=True,
)
