"""Attention of a few queries over a cache: planning and launch of `split_kv_kernel.py`."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from attention_kernels.decode.kv_cache import Access, Cache
from attention_kernels.decode.quantised_cache import QuantisedCache
from attention_kernels.decode.split_kv_assignment import KeyAssignment
from attention_kernels.decode.split_kv_kernel import split_kv_kernel
from attention_kernels.decode.split_kv_merge import COUNTERS_TOGETHER
from attention_kernels.decode.split_kv_plan import Plan, Tiling, invariant_parts, merging, plan
from attention_kernels.launch.launcher import Launch, PlanCache, PlannedCall, layout, named
from attention_kernels.launch.shape_checks import Sizes, check_shapes, check_types, sizes_of
from attention_kernels.launch.workspace import workspace
from attention_kernels.options import PLAIN, AttentionOptions
from attention_kernels.tiles.masking import window_sides
from attention_kernels.tiles.online_softmax import LOG2_E


class PackedQueries(NamedTuple):
    """Queries of several sequences, concatenated, and the memory for their results."""

    offsets: Tensor
    """(B + 1,) int32, start of each sequence's queries and the end of all."""
    most: int
    """Maximum number of queries of a sequence. The rows of longer sequences are not written."""
    output: Tensor
    """(Tq, Hq, Dv), contiguous."""
    lse: Tensor | None
    """(Hq, Tq) float32, contiguous; None if it is not needed."""


def attend_to_cache(
    query: Tensor,
    cache: Cache | QuantisedCache,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    sinks: Tensor | None = None,
    options: AttentionOptions = PLAIN,
    tiles: Tiling | None = None,
    return_lse: bool = False,
    packed: PackedQueries | None = None,
) -> Any:
    """Return softmax(scale · QKᵀ + mask) · V over a cache, as a contiguous (B, Hq, Sq, Dv).

    Args:
        query: (B, Hq, Sq, D), float16 or bfloat16, any strides; (1, Hq, Tq, D) with `packed`.
        cache: a cache on the query's device, in the query's dtype or in FP8 with any strides, or
            quantised by blocks.
        attn_mask: broadcasts to (B, Hq, Sq, Sk); bool (True = attend) or float (added).
        is_causal: query i sees tokens 0 to i for any lengths, as in SDPA. With bottom right in
            `options`, the last query sees all tokens, and each earlier query sees one token less
            than the next.
        scale: factor of the scores; None for 1/√D.
        sinks: (Hq,), one extra logit per head, which takes softmax weight but has no value.
        options: bottom right, window and soft cap; not together with indices.
        tiles: sizes of the work; None for the result of `planned`.
        return_lse: return a tuple of the output and the natural logarithm of each row's sum of
            exponentials, (B, Hq, Sq) float32, sinks included; -inf where every key is masked.
        packed: sequences with different numbers of queries, not together with a mask. The results
            are written to its tensors, which are returned.

    Raises:
        NotImplementedError: `options` ask for invariance over an 8-bit cache or chosen tokens.
        ValueError: the shapes do not fit together.
    """
    if query.numel() == 0:
        output = query.new_empty((*query.shape[:3], cache.sizes[2]))
        return (
            (output, query.new_empty(query.shape[:3], dtype=torch.float32))
            if return_lse
            else output
        )
    call = planned_call(
        query, cache, attn_mask, is_causal, scale, sinks, options, tiles, return_lse, packed
    )
    return call.run(
        query,
        cache.key,
        cache.value,
        attn_mask,
        sinks,
        cache.scales,
        cache.lengths,
        cache.indices,
        cache.block_table,
        cache.factors,
        packed,
    )


def planned_call(
    query: Tensor,
    cache: Cache | QuantisedCache,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    sinks: Tensor | None,
    options: AttentionOptions,
    tiles: Tiling | None,
    return_lse: bool,
    packed: PackedQueries | None = None,
) -> PlannedDecode:
    """Return the plan of a call of `attend_to_cache` with at least one query.

    The plan depends on everything but the contents and addresses of the tensors. Of the addresses
    of key and value, it depends on whether both are multiples of 16 and whether they are equal.
    """
    aligned = (cache.key.data_ptr() | cache.value.data_ptr()) % 16 == 0
    shape = (
        layout(query),
        cache.layouts,
        layout(attn_mask),
        layout(sinks),
        is_causal,
        scale,
        None if options is PLAIN else options,  # hashing options takes longer than all other hashes
        tiles,
        aligned,
        cache.tail,
        return_lse,
        packed and (packed.most, packed.lse is None),
    )
    return _calls.get(shape) or _calls.keep(
        shape,
        _plan_call(
            query,
            cache,
            attn_mask,
            is_causal,
            scale,
            options,
            tiles,
            sizes_of(sinks),
            return_lse,
            packed,
        ),
    )


def planned(
    query: Tensor,
    cache: Cache | QuantisedCache,
    *,
    is_causal: bool = False,
    options: AttentionOptions = PLAIN,
    has_mask: bool = False,
    packed: PackedQueries | None = None,
) -> Plan:
    """Return the plan of `attend_to_cache` for a call without `tiles`."""
    batch, heads, q_len, head_dim = _sizes(query, packed)
    kv_heads, kv_len, v_dim = cache.sizes
    kept = 0 if cache.indices is None else cache.indices.shape[2]
    is_causal, left, right = _sides(is_causal, options, q_len, kv_len)
    rows = heads // kv_heads * q_len
    is_cut = is_causal or left is not None or right is not None
    return plan(
        batch * kv_heads,
        rows,
        kept or _most_seen(left, 0 if is_causal else right, options, q_len, kv_len),
        head_dim,
        v_dim,
        _access(cache, is_cut, left is not None, rows, options),
        _processors(query.device),
        cache.tail,
        1 if cache.lengths is None or kept else batch,
        cache.largest_block,
        invariant_parts(kv_heads, has_mask) if options.invariant else 0,
        cache.key.element_size(),
    )


def _sizes(query: Tensor, packed: PackedQueries | None) -> Sizes:
    """Return B, Hq, the maximum number of queries of a sequence, and D."""
    if packed is None:
        return query.shape
    return packed.offsets.shape[0] - 1, query.shape[1], packed.most, query.shape[3]


def _access(
    cache: Cache | QuantisedCache,
    is_cut: bool,
    begins_late: bool,
    rows: int,
    options: AttentionOptions,
) -> Access:
    """Return how to read the cache: through pointers if a call is invariant, because descriptors
    depend on the size of the cache and shift a sequence's last block."""
    if not options.invariant:
        return cache.access(is_cut, begins_late, rows)
    if isinstance(cache, QuantisedCache) or cache.indices is not None:
        raise NotImplementedError("decode is invariant only over all tokens of a 16-bit cache")
    return cache.pointers


class PlannedDecode(NamedTuple):
    """Plan for calls of one shape."""

    call: PlannedCall
    output_shape: tuple[int, int, int, int]
    parts_numbers: int
    """Size of the scratch memory for the parts, in float32 numbers; 0 if there is only one part."""
    counters: int
    return_lse: bool
    in_pairs: bool
    """True if two FP8 numbers are read as one of 16 bits."""

    def run(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None,
        sinks: Tensor | None,
        scales: tuple[Tensor | None, ...] = (None, None, None),
        lengths: Tensor | None = None,
        indices: Tensor | None = None,
        block_table: Tensor | None = None,
        factors: tuple[Tensor | None, Tensor | None] = (None, None),
        packed: PackedQueries | None = None,
    ) -> Any:
        """Return the result of `attend_to_cache` for the tensors of a cache and of its call."""
        offsets = lse = parts = counters = None
        if packed is not None:
            offsets, output, lse = packed.offsets, packed.output, packed.lse
        else:
            output = query.new_empty(*self.output_shape)
        if self.return_lse and packed is None:
            lse = query.new_empty(*self.output_shape[:3], dtype=torch.float32)
        if self.in_pairs:
            key, value = key.view(torch.int16), value.view(torch.int16)
        if self.parts_numbers:
            parts, counters = workspace(self.parts_numbers, self.counters, query.device)
        self.call.launch(
            query,
            *self.call.operands(key, value),
            *scales,
            attn_mask,
            None if sinks is None else sinks.contiguous(),
            None if lengths is None else lengths.contiguous(),
            indices,
            block_table,
            offsets,
            *factors,
            output,
            lse,
            parts,
            counters,
        )
        return output if lse is None else (output, lse)


_calls: PlanCache[PlannedDecode] = PlanCache()


def _plan_call(
    query: Tensor,
    cache: Cache | QuantisedCache,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    options: AttentionOptions,
    tiles: Tiling | None,
    sinks: Sizes | None,
    return_lse: bool,
    packed: PackedQueries | None,
) -> PlannedDecode:
    """Plan everything about a call except the addresses of its tensors.

    The arguments are those of `attend_to_cache`, except that `sinks` is a shape.
    """
    sizes = _sizes(query, packed)
    check_types({}, options)
    check_shapes(sizes, *cache.shapes, sinks)
    _check_by_sequence(cache)
    batch, heads, q_len, head_dim = sizes
    kv_heads, kv_len, v_dim = cache.sizes
    group = heads // kv_heads
    kept = 0 if cache.indices is None else cache.indices.shape[2]
    cut = planned(
        query,
        cache,
        is_causal=is_causal,
        options=options,
        has_mask=attn_mask is not None,
        packed=packed,
    )
    is_causal, left, right = _sides(is_causal, options, q_len, kv_len)
    is_cut = is_causal or left is not None or right is not None
    access = _access(cache, is_cut, left is not None, group * q_len, options)
    tiles = tiles or cut.tiling
    # A block of another size could cross the boundary of two pages.
    has_descriptors = access in ("described", "quantised") and cache.page_size % tiles.block_n == 0
    assignment = tiles.assignment
    heads_of_keys = batch * kv_heads
    programs, splits = heads_of_keys, tiles.splits
    if assignment is not None:
        programs, splits = assignment.programs(heads_of_keys), 1
    is_merged = splits > 1 or assignment is not None
    merged = merging(cut, tiles, heads_of_keys, group * q_len, _processors(query.device))
    scale, cap = head_dim**-0.5 if scale is None else float(scale), None
    if options.softcap is not None:
        scale, cap = 2 * scale / options.softcap, options.softcap * LOG2_E.value
    mask_kind = 0
    mask_strides: tuple[int, ...] = (0, 0, 0, 0)
    if attn_mask is not None:
        mask = attn_mask.expand(batch, heads, q_len, kv_len)
        mask_strides = mask.stride()
        is_shared = all(mask.shape[axis] == 1 or mask_strides[axis] == 0 for axis in (1, 2))
        mask_kind = 1 if is_shared else 2
    key, value = cache.key, cache.value
    if cache.in_pairs:
        key, value = key.view(torch.int16), value.view(torch.int16)
    launch = Launch(
        split_kv_kernel,
        (programs, splits, cut.row_blocks),
        query.device,
        named("stride_query_", ("batch", "head", "token", "dim"), query.stride())
        | named("stride_key_", ("first", "head", "token", "dim"), cache.strides(key))
        | named("stride_value_", ("first", "head", "token", "dim"), cache.strides(value))
        | named("stride_mask_", ("batch", "head", "query", "token"), mask_strides)
        | {
            "scale": scale,
            "cap": cap,
            "left": left,
            "right": right,
            "kv_heads": kv_heads,
            "group": group,
            "q_len": q_len,
            "q_tokens": query.shape[2],
            "kv_len": kv_len,
            "kept": kept,
            "splits": splits if assignment is None else None,
            "sequences": None if assignment is None else batch,
            **(
                dict.fromkeys(KeyAssignment._fields) if assignment is None else assignment._asdict()
            ),
            "head_dim": head_dim - cache.tail,
            "tail_dim": cache.tail,
            "v_dim": v_dim,
            "stride_table": 0 if cache.block_table is None else cache.block_table.stride(0),
            **named("stride_key_factor_", ("sequence", "head"), _strides(cache.factors[0])),
            **named("stride_value_factor_", ("sequence", "head"), _strides(cache.factors[1])),
            "IS_CAUSAL": is_causal,
            "IS_BOTTOM_RIGHT": options.bottom_right,
            "MASK": mask_kind,
            "PAGE_SIZE": cache.page_size,
            "HAS_DESCRIPTORS": has_descriptors,
            "IN_PAIRS": cache.in_pairs,
            "IS_E5M2": cache.key.dtype == torch.float8_e5m2,
            "BLOCK_M": cut.block_m,
            "BLOCK_N": tiles.block_n,
            "BLOCK_D": cut.block_d,
            "BLOCK_TAIL": cut.block_tail,
            "BLOCK_DV": cut.block_dv,
            "BLOCK_ROWS": merged.block_rows,
            "ROW_CHUNKS": merged.row_chunks,
            "BLOCK_SPLITS": merged.block_splits,
            "TOGETHER": merged.together,
            "BLOCK_SEQUENCES": 0 if assignment is None else triton.next_power_of_2(batch),
            "PART": tiles.part,
            "MOST_PARTS": tiles.most_parts,
        },
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        maxnreg=tiles.registers,
    )
    descriptors = None
    if has_descriptors:
        descriptors = cache.descriptors(tiles.block_n, cut.block_d, cut.block_dv, cut.block_tail)
    return PlannedDecode(
        PlannedCall(launch, descriptors),
        (batch, heads, q_len, v_dim),
        programs * splits * group * q_len * (v_dim + 2) if is_merged else 0,
        heads_of_keys * cut.row_blocks * (COUNTERS_TOGETHER.value if merged.together else 1),
        return_lse,
        cache.in_pairs,
    )


def _check_by_sequence(cache: Cache | QuantisedCache) -> None:
    """Raise ValueError if the shape of the lengths or of the token indices does not fit."""
    batch, kv_heads, *_ = cache.shapes[0]
    if cache.lengths is not None and cache.lengths.shape != (batch,):
        raise ValueError(f"{tuple(cache.lengths.shape)} lengths of {batch} sequences")
    if cache.indices is not None and cache.indices.shape[:2] != (batch, kv_heads):
        of = f"{batch} sequences with {kv_heads} key heads"
        raise ValueError(f"indices of shape {tuple(cache.indices.shape)} for {of}")


def _strides(factor: Tensor | None) -> tuple[int | None, ...]:
    return (None, None) if factor is None else factor.stride()


def _sides(
    is_causal: bool, options: AttentionOptions, q_len: int, kv_len: int
) -> tuple[bool, int | None, int | None]:
    """Return whether there is a diagonal, and the numbers of keys that a window keeps visible
    before and after the diagonal."""
    is_causal, left, right = window_sides(is_causal, options, q_len, kv_len)
    if options.bottom_right and q_len == 1:
        # The diagonal of a single query is the last token, which that query always sees.
        return False, left, None
    return is_causal, left, right


def _most_seen(
    left: int | None, right: int | None, options: AttentionOptions, q_len: int, kv_len: int
) -> int:
    """Return the maximum number of tokens that the queries see in total."""
    most = kv_len
    if right is not None and not options.bottom_right:
        most = min(most, q_len + right)
    return most if left is None else min(most, left + q_len + (right or 0))


@functools.cache
def _processors(device: torch.device) -> int:
    if device.type == "cpu":
        return 4  # in the interpreter: few programs, but some splits
    return torch.cuda.get_device_properties(device).multi_processor_count
