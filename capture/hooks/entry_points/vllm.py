"""vLLM's attention backends: `forward` of every backend, with the metadata of the batch.

A layer writes new keys and values to the cache and then calls `impl.forward`, which reads the cache
through the block table and fills `output`. The metadata of some backends holds no lengths and no
block table, so the common metadata, which every builder receives, is kept with the metadata that
the builder returns. These functions run at every step, unless a CUDA graph of the whole step
replaces them.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from capture.call.attention_variant import AttentionVariant
from capture.errors import warned
from capture.hooks.batch_phase import phase_of_lengths, prepared
from capture.hooks.entry_points.functions import replaced
from capture.hooks.entry_points.vllm_graphs import WholeGraphs, is_capturing
from capture.hooks.entry_points.wrapper import THD, OutputLayout, wrapped, wrapped_everywhere
from capture.hooks.interceptor import Arguments, Handler
from capture.hooks.modules import named_site

ENTRY_POINT = "vllm"
_BACKEND = "vllm.v1.attention.backend"
_MLA = "vllm.model_executor.layers.attention.mla_attention"
_FP8 = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
"""Dtypes of caches that have a scale per tensor or per head, by vLLM's `kv_cache_dtype`."""
_BATCH = "_attention_replay_batch"
"""Attribute of a backend's metadata that holds its `Batch`."""


class Batch(NamedTuple):
    """Requests of one step of the engine."""

    common: Any
    """vLLM's `CommonAttentionMetadata`."""
    phase: str
    table: Tensor
    """(requests, blocks) block table."""
    starts: Tensor
    """(requests + 1,) first query of each request, then the total."""
    lengths: Tensor
    """(requests,) number of keys of each request; one tensor for all layers of a step."""


def serves(modules: Iterable[nn.Module]) -> bool:
    """Return whether vLLM runs one of these modules.

    Its compiled code calls the backends too, and must not run in any other way.
    """
    return any(type(module).__module__.startswith("vllm.") for module in modules)


@contextlib.contextmanager
def follow(handler: Handler) -> Iterator[None]:
    """Pass calls of vLLM's backends to `handler` until the exit."""
    backend, mla = sys.modules.get(_BACKEND), sys.modules.get(_MLA)
    builders = getattr(backend, "AttentionMetadataBuilder", None)
    plain, latent = (getattr(backend, name, None) for name in ("AttentionImpl", "MLAAttentionImpl"))
    layer = getattr(mla, "MLAAttention", None)
    graphs = WholeGraphs(handler, phase_of, ENTRY_POINT)
    with contextlib.ExitStack() as stack:
        stack.enter_context(graphs.follow(_methods(builders, "build")))
        for build in _methods(builders, "build"):
            stack.enter_context(replaced(build, _keeping_batch))
        for update in _methods(builders, "update_block_table"):
            stack.enter_context(replaced(update, _keeping_table))
        for forward in _methods(plain, "forward"):
            stack.enter_context(
                replaced(forward, lambda own: _at_layer(wrapped(own, _translated, handler), graphs))
            )
        for decode in _methods(latent, "forward_mqa"):
            stack.enter_context(wrapped_everywhere(decode, _translated_mqa, handler))
        if layer is not None:
            stack.enter_context(
                replaced(layer.forward_impl, lambda own: _at_latent_layer(own, graphs))
            )
        try:
            yield
        finally:
            prepared.phase = None


def _at_layer(forward: Callable[..., Any], graphs: WholeGraphs) -> Callable[..., Any]:
    """Name the layer and the phase of a backend's call."""

    @functools.wraps(forward)
    def named(
        impl: Any,
        layer: Any,
        query: Any,
        key: Any,
        value: Any,
        kv_cache: Any,
        attn_metadata: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        given = (query, key, value, kv_cache, attn_metadata)
        graphs.a_layer_ran()
        with _site(layer, attn_metadata):
            return forward(impl, layer, *given, *args, **kwargs)

    return named


def _at_latent_layer(forward: Callable[..., Any], graphs: WholeGraphs) -> Callable[..., Any]:
    """Name the layer and the phase of the calls that a layer of latent attention (MLA) makes."""

    @functools.wraps(forward)
    def named(
        layer: Any,
        q: Any,
        k_c_normed: Any,
        k_pe: Any,
        kv_cache: Any,
        attn_metadata: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        graphs.a_layer_ran()
        with _site(layer, attn_metadata):
            return forward(layer, q, k_c_normed, k_pe, kv_cache, attn_metadata, *args, **kwargs)

    return named


def _site(layer: Any, metadata: Any) -> contextlib.AbstractContextManager[None]:
    batch = getattr(metadata, _BATCH, None)
    return contextlib.nullcontext() if batch is None else named_site(layer.layer_name, batch.phase)


def _methods(base: type | None, name: str) -> list[types.FunctionType]:
    """Return the methods of this name that loaded subclasses of a class define."""
    classes: list[type] = [] if base is None else [base]
    found: dict[types.FunctionType, None] = {}
    while classes:
        subclasses: list[type] = type.__subclasses__(classes.pop())
        classes += subclasses
        for subclass in subclasses:
            method = vars(subclass).get(name)
            if isinstance(method, types.FunctionType):
                found[method] = None
    return list(found)


def _keeping_batch(build: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(build)
    def keeping(
        builder: Any, common_prefix_len: int, common_attn_metadata: Any, *args: Any, **kwargs: Any
    ) -> Any:
        metadata = build(builder, common_prefix_len, common_attn_metadata, *args, **kwargs)
        # A builder may divide the batch and call another builder, whose batch the backend gets.
        if not hasattr(metadata, _BATCH):
            with warned("a batch could not be read"):
                common = common_attn_metadata
                starts = common.query_start_loc[: common.num_reqs + 1]
                lengths = common.seq_lens[: common.num_reqs]
                table = common.block_table_tensor
                prepared.phase = phase_of(common)
                setattr(metadata, _BATCH, Batch(common, prepared.phase, table, starts, lengths))
        return metadata

    return keeping


def _keeping_table(update: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(update)
    def keeping(builder: Any, metadata: Any, blk_table: Tensor, *args: Any, **kwargs: Any) -> Any:
        updated = update(builder, metadata, blk_table, *args, **kwargs)
        if hasattr(metadata, _BATCH):
            setattr(updated, _BATCH, getattr(metadata, _BATCH)._replace(table=blk_table))
        return updated

    return keeping


def phase_of(common: Any) -> str:
    """Return the phase of a batch, given vLLM's `CommonAttentionMetadata`."""
    count, prefilling = common.num_reqs, common.is_prefilling
    lengths = common.seq_lens_cpu_upper_bound
    return phase_of_lengths(
        common.query_start_loc_cpu[: count + 1].diff().tolist(),
        None if lengths is None else lengths[:count].tolist(),
        None if prefilling is None else prefilling[:count].tolist(),
    )


def _translated(
    impl: Any,
    layer: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kv_cache: Tensor,
    attn_metadata: Any,
    output: Tensor,
    output_scale: Tensor | None = None,
    output_block_scale: Tensor | None = None,
) -> tuple[Arguments, OutputLayout] | None:
    if attn_metadata is None or is_capturing(query):  # vLLM profiles its memory, or makes a graph
        return None
    batch = getattr(attn_metadata, _BATCH, None)
    is_fp8 = layer.kv_cache_dtype in _FP8
    refusals = {
        "a batch that was built before the recording": batch is None,
        "ALiBi": impl.alibi_slopes is not None,
        f"a {layer.kv_cache_dtype} cache": not is_fp8 and query.dtype != kv_cache.dtype,
        "a quantised output": output_scale is not None or output_block_scale is not None,
        f"{layer.attn_type} attention": layer.attn_type != "decoder",
    }
    backend = f"vllm-{layer.attn_backend.get_name().lower()}"
    refused = [what for what, is_so in refusals.items() if is_so]
    if refused or batch is None:
        rows, keys, values = (each.transpose(0, 1)[None] for each in (query, key, value))
        arguments = Arguments.of(rows, keys, values, None, entry_point=ENTRY_POINT, backend=backend)
        return arguments._replace(refusal=f"takes {', '.join(refused)}"), _layout(output)
    common, requests = batch.common, batch.common.num_reqs
    tokens = int(common.query_start_loc_cpu[requests])  # `num_actual_tokens` may count padding
    if is_fp8:  # Triton's backend has its own dtype, whatever the layer's
        kv_cache = kv_cache.view(getattr(impl, "fp8_dtype", _FP8[layer.kv_cache_dtype]))
    keys, values = _pools(layer, kv_cache)
    left = None if layer.sliding_window is None else layer.sliding_window - 1
    return Arguments.of(
        query[:tokens].transpose(0, 1)[None],
        keys,
        values,
        None,
        is_causal=common.causal,
        scale=impl.scale,
        sinks=getattr(impl, "sinks", None),
        cu_seqlens_q=batch.starts,
        seqused_k=batch.lengths,
        page_table=batch.table[:requests],
        variant=AttentionVariant(
            bottom_right=True,
            window=(left, None if left is None else 0),
            softcap=impl.logits_soft_cap or None,
            max_seqlen_q=common.max_query_len,
            max_seqlen_k=common.max_seq_len,
        ),
        entry_point=ENTRY_POINT,
        backend=backend,
        **_scales(layer, query, keys, layer._v_scale if is_fp8 else None),
    ), _layout(output[:tokens])


def _translated_mqa(
    impl: Any, q: Any, kv_c_and_k_pe_cache: Tensor, attn_metadata: Any, layer: Any
) -> tuple[Arguments, OutputLayout] | None:
    """Translate the decoding of latent attention: the keys' first columns are the values.

    A batch begins with the requests that decode.
    """
    if is_capturing(kv_c_and_k_pe_cache):
        return None
    query = torch.cat(q, -1) if isinstance(q, tuple) else q
    batch, cache = getattr(attn_metadata, _BATCH, None), kv_c_and_k_pe_cache
    is_fp8 = layer.kv_cache_dtype in _FP8
    refusals = {
        "a batch that was built before the recording": batch is None,
        f"a {layer.kv_cache_dtype} cache": not is_fp8 and query.dtype != cache.dtype,
        "chosen keys": getattr(attn_metadata, "num_decodes", None) is None,
    }
    backend = f"vllm-{layer.attn_backend.get_name().lower()}"
    refused = [what for what, is_so in refusals.items() if is_so]
    if refused or batch is None:
        rows = query.transpose(0, 1)[None]
        arguments = Arguments.of(rows, rows, rows, None, entry_point=ENTRY_POINT, backend=backend)
        return arguments._replace(refusal=f"takes {', '.join(refused)}"), THD
    common, requests = batch.common, attn_metadata.num_decodes
    keys = cache.unsqueeze(1)
    starts = common.query_start_loc_cpu[: requests + 1]
    tokens, padding = int(starts[-1]), len(query) - int(starts[-1])
    return Arguments.of(
        query[:tokens].transpose(0, 1)[None],
        keys,
        keys[..., : impl.kv_lora_rank],
        None,
        is_causal=True,
        scale=impl.scale,
        cu_seqlens_q=common.query_start_loc[: requests + 1],
        seqused_k=common.seq_lens[:requests],
        page_table=batch.table[:requests],
        variant=AttentionVariant(
            bottom_right=True,
            max_seqlen_q=int(starts.diff().max()),
            max_seqlen_k=common.max_seq_len,
        ),
        entry_point=ENTRY_POINT,
        backend=backend,
        **_scales(layer, query, keys, layer._k_scale if is_fp8 else None),
    ), OutputLayout(
        lambda output: output[:tokens].transpose(0, 1)[None],
        lambda found: pad(found[0].transpose(0, 1), (0, 0, 0, 0, 0, padding)),
    )


def _scales(layer: Any, query: Tensor, keys: Tensor, of_values: Tensor | None) -> dict[str, Any]:
    """Return the scales of a layer with an FP8 cache for each key head; empty for other caches.

    Args:
        of_values: scale of the values; None for a cache that is not FP8.
    """
    if of_values is None:
        return {}
    found = {"key_scale": layer._k_scale, "value_scale": of_values}
    if query.itemsize == 1:  # some backends take the query in FP8 too
        found["query_scale"] = layer._q_scale
    return {name: scale.expand(keys.shape[1]) for name, scale in found.items()}


def _layout(output: Tensor) -> OutputLayout:
    """Return the layout of a call that fills `output` (tokens, Hq, Dv)."""
    return OutputLayout(
        lambda result: output.transpose(0, 1)[None],
        lambda found: output.copy_(found[0].transpose(0, 1)),
    )


def _pools(layer: Any, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
    """Return the keys and values of a cache as pools of pages (P, Hkv, page_size, D)."""
    blocks, heads, slots, width, parts = _dimensions(layer.attn_backend)
    keys, values = kv_cache.permute(parts, blocks, heads, slots, width).unbind(0)
    return keys, values


@functools.cache
def _dimensions(backend: Any) -> tuple[int, ...]:
    """Return where a backend's cache has blocks, heads, slots of a block, width, and K and V."""
    blocks, heads, slots, width = 1_000_003, 10_007, 16 * 1_009, 128
    shape = backend.get_kv_cache_shape(blocks, slots, heads, width)
    found = tuple(shape.index(size) for size in (blocks, heads, slots, width))
    (parts,) = set(range(len(shape))) - set(found)
    return (*found, parts)
