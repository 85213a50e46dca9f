"""Stand-in for the parts of vLLM 0.22 that recording meets: backends, builders and one layer.

Two layouts of caches, and a builder that, like vLLM's, returns metadata without the block table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests.replay.kernels.stand_ins import heads_second, textbook

SLOTS = 16
"""Tokens in a block of the cache."""
FP8 = {"fp8": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


class AttentionImpl:
    """Base of the backends' implementations."""


class AttentionMetadataBuilder:
    """Base of the backends' builders."""

    def build(self, common_prefix_len: int, common_attn_metadata: Any) -> Any:
        raise NotImplementedError


@dataclass
class CommonAttentionMetadata:
    """Batch of requests, as the model runner describes it."""

    query_start_loc: Tensor
    query_start_loc_cpu: Tensor
    seq_lens: Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: Tensor
    causal: bool = True
    is_prefilling: Tensor | None = None
    seq_lens_cpu_upper_bound: Tensor | None = None


def batch_of(
    queries: Sequence[int], lengths: Sequence[int], table: Tensor, prefilling: Sequence[bool] | None
) -> CommonAttentionMetadata:
    """Return a batch from the numbers of each request, and its rows of the block table."""
    starts = torch.tensor([0, *queries]).cumsum(0).int()
    after = torch.tensor(lengths).int()
    return CommonAttentionMetadata(
        *(starts, starts, after, len(queries), sum(queries), max(queries), max(lengths)),
        table.int(),
        is_prefilling=None if prefilling is None else torch.tensor(prefilling),
        seq_lens_cpu_upper_bound=after,
    )


@dataclass
class Metadata:
    """Metadata of a backend."""

    common: CommonAttentionMetadata
    num_decodes: int


class Builder(AttentionMetadataBuilder):
    def build(self, common_prefix_len: int, common_attn_metadata: Any) -> Metadata:
        return Metadata(common_attn_metadata, common_attn_metadata.num_reqs)


class FirstBackend:
    """Backend whose cache is (2, blocks, slots, heads, width)."""

    @staticmethod
    def get_name() -> str:
        return "FLASH_ATTN"

    @staticmethod
    def get_kv_cache_shape(num_blocks: int, *others: int) -> tuple[int, ...]:
        return (2, num_blocks, *others)


class SecondBackend(FirstBackend):
    """Backend whose cache is (blocks, 2, slots, heads, width)."""

    @staticmethod
    def get_name() -> str:
        return "TRITON_ATTN"

    @staticmethod
    def get_kv_cache_shape(num_blocks: int, *others: int) -> tuple[int, ...]:
        return (num_blocks, 2, *others)


class Impl(AttentionImpl):
    """Attention over the cache, one request after another."""

    def __init__(self, scale: float, sinks: Tensor | None = None, soft_cap: float = 0.0) -> None:
        self.scale, self.sinks, self.logits_soft_cap = scale, sinks, soft_cap
        self.alibi_slopes = None

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Metadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        if attn_metadata is None:
            return output.fill_(0)
        if layer.kv_cache_dtype != "auto":
            kv_cache = kv_cache.view(FP8[layer.kv_cache_dtype])
        parts = kv_cache.unbind(0 if kv_cache.shape[0] == 2 else 1)
        scales = layer._k_scale, layer._v_scale
        return self.attend(layer, query, parts, scales, attn_metadata.common, output)

    def attend(
        self,
        layer: Any,
        query: Tensor,
        parts: tuple[Tensor, ...],
        scales: tuple[Tensor, Tensor],
        common: CommonAttentionMetadata,
        output: Tensor,
    ) -> Tensor:
        query = query.double() * layer._q_scale
        for request in range(common.num_reqs):
            rows = slice(*common.query_start_loc[request : request + 2].tolist())
            length = int(common.seq_lens[request])
            keys, values = (
                pool[common.block_table_tensor[request].long()].flatten(0, 1)[:length].double()
                * scale[..., None]
                for pool, scale in zip(parts, scales, strict=True)
            )
            found = textbook(
                *map(heads_second, (query[rows], keys, values)),
                self.scale,
                causal=True,
                window=(None if layer.sliding_window is None else layer.sliding_window - 1, None),
                softcap=self.logits_soft_cap,
                sink=self.sinks,
            )
            output[rows] = found[0].transpose(0, 1)
        return output


class MLAAttentionImpl:
    """Base of the implementations of latent attention."""


class LatentImpl(MLAAttentionImpl):
    """Decoding of latent attention, whose values are the first columns of the keys."""

    def __init__(self, scale: float, kv_lora_rank: int) -> None:
        self.scale, self.kv_lora_rank = scale, kv_lora_rank

    def forward_mqa(
        self, q: Any, kv_c_and_k_pe_cache: Tensor, attn_metadata: Metadata, layer: Any
    ) -> tuple[Tensor, None]:
        query, keys = torch.cat(q, -1), kv_c_and_k_pe_cache.unsqueeze(2)
        output = query.new_full((*query.shape[:2], self.kv_lora_rank), torch.nan)
        parts, scales = (keys, keys[..., : self.kv_lora_rank]), (layer._k_scale, layer._k_scale)
        common = attn_metadata.common
        return Impl(self.scale).attend(layer, query, parts, scales, common, output), None


class Layer(nn.Module):
    """Layer of a model, with its own cache."""

    __module__ = "vllm.attention"

    def __init__(self, name: str, backend: type, impl: Any, cache: Tensor) -> None:
        super().__init__()
        self.layer_name, self.attn_backend, self.impl = name, backend, impl
        self.kv_cache, self.kv_cache_dtype, self.attn_type = cache, "auto", "decoder"
        self._q_scale = self._k_scale = self._v_scale = torch.tensor(1.0)
        self.sliding_window: int | None = None
        self.query_dtype = torch.float32

    def forward(self, query: Tensor, key: Tensor, value: Tensor, metadata: Any) -> Tensor:
        dtype = torch.bfloat16 if query.itemsize == 1 else None
        output = torch.full(query.shape, torch.nan, dtype=dtype)
        self.impl.forward(self, query, key, value, self.kv_cache, metadata, output=output)
        return output.flatten(1)


class MLAAttention(Layer):
    """Layer of latent attention, whose cache is (blocks, slots, width)."""

    __module__ = "vllm.attention"
    has_prompts_only = False
    """True if the next batches have only prompts, which `forward_mqa` does not compute."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, metadata: Any) -> Tensor:
        return self.forward_impl(query, key, value, self.kv_cache, metadata)

    def forward_impl(
        self, q: Tensor, k_c_normed: Tensor, k_pe: Tensor, kv_cache: Tensor, attn_metadata: Any
    ) -> Tensor:
        if self.has_prompts_only:
            return q.flatten(1)
        if self.kv_cache_dtype != "auto":
            kv_cache = kv_cache.view(FP8[self.kv_cache_dtype])
        parts = q.split([self.impl.kv_lora_rank, q.shape[-1] - self.impl.kv_lora_rank], -1)
        return self.impl.forward_mqa(parts, kv_cache, attn_metadata, self)[0].flatten(1)
