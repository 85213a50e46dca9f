"""The vocabulary: one attention call, and where it came from."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from capture.call import pages
from capture.call.attention_variant import (
    PLAIN,
    VARIANT_TENSORS,
    AttentionVariant,
    KeyRanges,
    beyond_arguments,
    features,
    key_ranges,
)
from capture.call.shape import Shape
from capture.call.strides import copy_with_strides, is_leading_part
from capture.text.printable import printable


@dataclass(frozen=True)
class Origin:
    """Where a call came from; every field is JSON-serialisable."""

    model: str = ""
    """Name given at capture: `cogvideo`, a directory, or the `name` passed to `record`."""
    weights: str = ""
    """Which weights produced the values, in a phrase: `random, seed 0`, a checkpoint id …"""
    module: str = ""
    """Dotted path of the innermost watched module: `transformer.transformer_blocks.0.attn1`."""
    call_index: int = 0
    """Position among *all* attention calls of the recording, from 0."""
    step: int = 0
    """Forward passes of the module that decides the phase before the one that made this call."""
    phase: str = ""
    """`denoise`, `prefill`, `decode` or `encode` (`capture.hooks.phases`)."""
    device: str = "cpu"
    """Device the model ran on, with the name of a GPU: `cpu`, `cuda (NVIDIA H200)`."""
    seed: int | None = None
    rank: int | None = None
    """Of the process that made the call, where there were several."""
    entry_point: str = "sdpa"
    """How the model called attention: `sdpa`, or a library's function or registry."""
    backend: str = ""
    """The torch backend that produced the output, as a kernel name: `torch-flash` …"""
    disabled_backends: list[str] = field(default_factory=list)
    """Torch backends that were switched off when the model made the call (`sdpa_kernel`,
    `torch.backends.cuda.enable_flash_sdp(False)` …), as kernel names; empty for plain SDPA."""
    heads: str = ""
    """The query heads of the model's call that are stored, if not all: `0,2-3`. Of a part, those of
    the whole call, where that is known."""
    split: str = ""
    """What several ranks share out of the model's call, of which this is one part: `heads` or
    `queries` (`capture.call.splits`); empty for a whole call."""
    split_ranks: list[int] = field(default_factory=list)
    """The ranks that share the call, in the order of their parts; of a joined call, those that
    shared it."""
    call_in_step: int = 0
    """Position among the calls of this module in this step; counted where there are ranks."""
    difficulty: float | None = None
    """The relative error of INT8 attention on a sample of its tokens, where calls were chosen by it
    (`sample="hard"`) and it is a number (`capture.recording.difficulty`)."""
    versions: dict[str, str] = field(default_factory=dict)
    derived: str = ""
    """What of which recorded call this is, and whether its output was computed anew
    (`replay reproduce`); empty for a recorded call."""

    @property
    def device_type(self) -> str:
        """`cpu` or `cuda`: the device without its name."""
        return self.device.partition(" ")[0]


@dataclass(frozen=True)
class AttentionCall:
    """One attention call: the arguments the model passed, and the output it got back.

    `query` is (B, Hq, Sq, D), `key` (B, Hkv, Sk, D), `value` (B, Hkv, Sk, Dv) and `output`
    (B, Hq, Sq, Dv). Tensors have the model's own shapes, dtypes **and strides**. `attn_mask`
    broadcasts to (B, Hq, Sq, Sk): bool (True = attend) or float (added to the scores). `scale=None`
    means 1/sqrt(D). `output` is None for synthetic calls and captures made with `output=False`.

    Everything after `enable_gqa` is beyond SDPA (`capture.call.attention_variant` has the
    formula). Of a packed call, whose sequences lie behind one another, B is 1 and Sq and Sk are the
    totals. With a page table, `key` is (P, Hkv, page_size, D), `value` likewise, and Sk what the
    table has room for.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    output: Tensor | None = None
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False
    dropout_p: float = 0.0
    sinks: Tensor | None = None
    """(Hq,): a logit for each head that takes weight from the keys and has no value."""
    cu_seqlens_q: Tensor | None = None
    """(N + 1,) int32, of a packed call: where each sequence's queries begin, and the total."""
    cu_seqlens_k: Tensor | None = None
    """The same of its keys."""
    seqused_k: Tensor | None = None
    """(B,) or, packed, (N,) int32: how many keys of each sequence count, from its first."""
    page_table: Tensor | None = None
    """(B, n) or, packed, (N, n) int32: the pages that each sequence's keys lie in
    (`capture.call.pages`). Then `seqused_k` is there too, and `cu_seqlens_k` is not."""
    variant: AttentionVariant = PLAIN
    origin: Origin = field(default_factory=Origin)

    def __repr__(self) -> str:
        """Format as `AttentionCall(flux layers.0.attn, step 3, 1×24×4608×128 bfloat16 on cpu)`."""
        origin, mask = self.origin, self.attn_mask
        parts = [
            printable(f"{origin.model} {origin.module}").strip(),
            f"step {origin.step}" if origin.module else "",
            f"{self.shape} {str(self.dtype).removeprefix('torch.')} on {self.device}",
            "causal" if self.is_causal else "",
            "" if mask is None else f"mask {'×'.join(map(str, mask.shape))}",
            *self.features,
        ]
        return f"AttentionCall({', '.join(filter(None, parts))})"

    @property
    def features(self) -> tuple[str, ...]:
        """What a kernel must know beyond SDPA, of `capture.call.attention_variant.FEATURES`."""
        return features(self)

    @property
    def key_ranges(self) -> KeyRanges:
        """Which keys each query sees, before any `attn_mask`; of all that pages have room for."""
        starts_k, kv_len = self.cu_seqlens_k, self.shape.kv_len
        if self.page_table is not None and self.cu_seqlens_q is not None:
            starts_k = _even_starts(self.page_table.shape[0], kv_len, self.device)
        return key_ranges(
            self.query.shape[2],
            kv_len,
            self.device,
            is_causal=self.is_causal,
            variant=self.variant,
            cu_seqlens_q=self.cu_seqlens_q,
            cu_seqlens_k=starts_k,
            seqused_k=self.seqused_k,
        )

    @property
    def shape(self) -> Shape:
        batch, q_heads, q_len, head_dim = self.query.shape
        kv_heads, kv_len = self.key.shape[1:3]
        if self.page_table is not None:
            is_packed = self.cu_seqlens_q is not None
            kv_len = pages.kv_len(self.page_table.shape, kv_len, is_packed=is_packed)
        return Shape(batch, q_heads, kv_heads, q_len, kv_len, head_dim, self.value.shape[3])

    @property
    def value_is_in_key(self) -> bool:
        """Whether the value is the key's first Dv columns, in the same memory: absorbed MLA."""
        return is_leading_part(self.value, self.key)

    @property
    def dtype(self) -> torch.dtype:
        return self.query.dtype

    @property
    def device(self) -> torch.device:
        return self.query.device

    @property
    def softmax_scale(self) -> float:
        """The factor applied to QKᵀ: `scale`, or 1/sqrt(D) when that is None."""
        return self.query.shape[-1] ** -0.5 if self.scale is None else self.scale

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments that repeat the call: `F.scaled_dot_product_attention(**arguments)`.

        Those beyond SDPA are there if the call has them.
        """
        arguments: dict[str, Any] = {
            "query": self.query,
            "key": self.key,
            "value": self.value,
            "attn_mask": self.attn_mask,
            "dropout_p": self.dropout_p,
            "is_causal": self.is_causal,
            "scale": self.scale,
        }
        if self.enable_gqa:
            arguments["enable_gqa"] = True
        return {**arguments, **beyond_arguments(self)}

    def to(self, device: str | torch.device) -> AttentionCall:
        """Return the same call with every tensor copied to `device`, strides preserved."""
        copies = {name: copy_with_strides(each, device) for name, each in self.tensors().items()}
        if self.value_is_in_key:
            copies["value"] = copies["key"][..., : self.value.shape[-1]]
        return self.with_tensors(copies)

    def without_pages(self) -> AttentionCall:
        """Return the same call with each sequence's keys in one piece, gathered from its pages.

        There is room for as many as the longest sequence has, in whole pages; those after a
        sequence's last key are zeros. Waits for the GPU.
        """
        if self.page_table is None or self.seqused_k is None:
            return self
        sequences, page_size = self.page_table.shape[0], self.key.shape[2]
        most = max(1, -(-int(self.seqused_k.max()) // page_size))
        table = self.page_table[:, :most]
        table = table.where(pages.read_entries(table, self.seqused_k, page_size), 0)
        key, value = (pages.gathered(each, table) for each in (self.key, self.value))
        is_key = torch.arange(most * page_size, device=self.device) < self.seqused_k[:, None]
        for each in (key, value):  # by their bytes: float8 has no masked_fill_
            each.view(torch.uint8).masked_fill_(~is_key[:, None, :, None], 0)
        starts_k = None
        if self.cu_seqlens_q is not None:
            key, value = (each.transpose(0, 1).flatten(1, 2)[None] for each in (key, value))
            starts_k = _even_starts(sequences, key.shape[2], self.device)
        return replace(self, key=key, value=value, page_table=None, cu_seqlens_k=starts_k)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that are not None, by field name."""
        named = {name: getattr(self, name) for name in TENSOR_FIELDS}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def with_tensors(self, tensors: dict[str, Tensor]) -> AttentionCall:
        """Return the same call with some tensors replaced, named as in `tensors()`."""
        return replace(self, **tensors)  # type: ignore[arg-type]


def _even_starts(sequences: int, total: int, device: torch.device) -> Tensor:
    """`cu_seqlens_k` of sequences that all have room for as many keys."""
    each = total // sequences
    return torch.arange(sequences + 1, dtype=torch.int32, device=device) * each


TENSOR_FIELDS = ("query", "key", "value", "attn_mask", "output", *VARIANT_TENSORS)
