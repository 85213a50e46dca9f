"""Defines an attention call and its origin."""

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
    output_dtype,
)
from capture.call.gradients import GRADIENT_FIELDS
from capture.call.per_head import SCALES, true_values
from capture.call.shape import Shape
from capture.call.strides import copy_with_strides, is_leading_part
from capture.text.printable import printable


@dataclass(frozen=True)
class Origin:
    """Origin of a call; every field is JSON-serialisable."""

    model: str = ""
    """Name of the capture: `cogvideo`, a directory, or the `name` passed to `record`."""
    weights: str = ""
    """Description of the model's weights: `random, seed 0`, a checkpoint id …"""
    module: str = ""
    """Dotted path of the innermost watched module: `transformer.transformer_blocks.0.attn1`."""
    call_index: int = 0
    """Index among *all* attention calls of the recording, from 0."""
    step: int = 0
    """Index of the denoising step, from 0; in other phases, the forward index."""
    phase: str = ""
    """`denoise`, `prefill`, `extend`, `decode`, `mixed` or `encode` (`capture.hooks.phases`)."""
    device: str = "cpu"
    """Device that the model ran on, with the GPU's name: `cpu`, `cuda (NVIDIA H200)`."""
    seed: int | None = None
    rank: int | None = None
    """Rank of the process that made the call; None if there was only one process."""
    entry_point: str = "sdpa"
    """Entry point that the model called: `sdpa`, or a library's function or registry."""
    backend: str = ""
    """Kernel name of the torch backend that produced the output: `torch-flash` …"""
    disabled_backends: list[str] = field(default_factory=list)
    """Kernel names of the torch backends that were switched off when the model made the call
    (`sdpa_kernel`, `torch.backends.cuda.enable_flash_sdp(False)` …)."""
    heads: str = ""
    """Stored query heads of the model's call, such as `0,2-3`; empty for all. For a part, these are
    the indices in the whole call; empty if they are unknown."""
    split: str = ""
    """Dimension by which ranks divide the model's call: `heads` or `queries`
    (`capture.call.splits`); empty if this is a whole call and not a part."""
    split_ranks: list[int] = field(default_factory=list)
    """Ranks that share the call, or shared it before joining, in the order of their parts."""
    call_in_step: int = 0
    """Index among the calls of this module in this forward pass; always 0 without ranks."""
    difficulty: float | None = None
    """Relative error of INT8 attention on a sample of the tokens (`capture.recording.difficulty`);
    None unless calls were chosen by difficulty (`sample="hard"`)."""
    nonfinite: str = ""
    """NaN and infinite elements of each tensor, such as `value 12 NaN`; empty if none were counted.
    `sample="hard"` counts them in every call, other samplers in one call that has some."""
    versions: dict[str, str] = field(default_factory=dict)
    forward_index: int | None = None
    """Index of the forward pass of the module that decides the phase, from 0. A step of
    classifier-free guidance may have two. None in old recordings, where `step` has this index."""
    derived: str = ""
    """Changes that `replay reproduce` made to a recorded call; empty for a recorded call."""

    @property
    def device_type(self) -> str:
        """Type of the device, `cpu` or `cuda`."""
        return self.device.partition(" ")[0]


@dataclass(frozen=True)
class AttentionCall:
    """One attention call: the arguments that the model passed, and the output that it received.

    `query` is (B, Hq, Sq, D), `key` (B, Hkv, Sk, D), `value` (B, Hkv, Sk, Dv) and `output`
    (B, Hq, Sq, Dv). Tensors have the model's own shapes, dtypes **and strides**. `attn_mask`
    broadcasts to (B, Hq, Sq, Sk): bool (True = attend) or float (added to the scores). `scale=None`
    means 1/sqrt(D). `output` is None for synthetic calls and captures made with `output=False`.

    Fields after `dropout_p` do not exist in SDPA (`capture.call.attention_variant` has the
    formula). A packed call contains concatenated sequences: B is 1, and Sq and Sk are total
    lengths. With a page table, `key` is (P, Hkv, page_size, D), `value` is
    (P, Hkv, page_size, Dv), and Sk is the number of keys that the table has room for.
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
    """(Hq,) logits, one per head; a logit takes weight from the keys but has no value."""
    cu_seqlens_q: Tensor | None = None
    """(N + 1,) int32, only in a packed call: first query of each sequence, then the total."""
    cu_seqlens_k: Tensor | None = None
    """(N + 1,) int32, only in a packed call: first key of each sequence, then the total."""
    seqused_k: Tensor | None = None
    """(B,) or, packed, (N,) int32: number of valid keys of each sequence, from its first."""
    page_table: Tensor | None = None
    """(B, n) or, packed, (N, n) int32: pages that hold each sequence's keys (`capture.call.pages`).
    A call with a page table has `seqused_k`, and no `cu_seqlens_k`."""
    query_scale: Tensor | None = None
    """(Hkv,) float32: factor that restores 8-bit queries (`capture.call.per_head`). The output of
    such a call is bfloat16."""
    key_scale: Tensor | None = None
    """(Hkv,) float32: factor that restores 8-bit keys."""
    value_scale: Tensor | None = None
    """(Hkv,) float32: factor that restores 8-bit values."""
    variant: AttentionVariant = PLAIN
    origin: Origin = field(default_factory=Origin)
    grad_output: Tensor | None = None
    """(B, Hq, Sq, Dv): gradient that reached the output; None unless recorded (`backward=True`)."""
    grad_query: Tensor | None = None
    """(B, Hq, Sq, D): gradient that this call's own backward returned for the query; None if it
    returned none. The gradients below are the same of other tensors."""
    grad_key: Tensor | None = None
    grad_value: Tensor | None = None
    grad_mask: Tensor | None = None
    """Gradient of `attn_mask`, in its shape: summed over dimensions of size 1."""
    grad_sinks: Tensor | None = None

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
        """Features beyond SDPA that a kernel must support, as names in `FEATURES`."""
        return features(self)

    @property
    def key_ranges(self) -> KeyRanges:
        """Range of keys that each query sees, without the effect of `attn_mask`."""
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
        """True if the value is the key's first Dv columns in the same memory (absorbed MLA)."""
        return is_leading_part(self.value, self.key)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the output: the query's, or bfloat16 if the query has a scale."""
        return output_dtype(self)

    @property
    def device(self) -> torch.device:
        return self.query.device

    @property
    def softmax_scale(self) -> float:
        """Factor applied to QKᵀ: `scale`, or 1/sqrt(D) if `scale` is None."""
        return self.query.shape[-1] ** -0.5 if self.scale is None else self.scale

    def arguments(self) -> dict[str, Any]:
        """Return keyword arguments for `scaled_dot_product_attention` that repeat the call.

        Options that SDPA does not have are included if the call has them.
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
        """Return the same call with every tensor copied to `device`, with the same strides."""
        copies = {name: copy_with_strides(each, device) for name, each in self.tensors().items()}
        if self.value_is_in_key:
            copies["value"] = copies["key"][..., : self.value.shape[-1]]
        return self.with_tensors(copies)

    def without_pages(self) -> AttentionCall:
        """Return the same call with contiguous keys and values, gathered from the pages.

        Every sequence is padded with zeros to the length of the longest sequence, rounded up to
        whole pages. Waits for the GPU.
        """
        if self.page_table is None or self.seqused_k is None:
            return self
        sequences, page_size = self.page_table.shape[0], self.key.shape[2]
        most = max(1, -(-int(self.seqused_k.max()) // page_size))
        table = self.page_table[:, :most]
        table = table.where(pages.read_entries(table, self.seqused_k, page_size), 0)
        key, value = (pages.gathered(each, table) for each in (self.key, self.value))
        is_key = torch.arange(most * page_size, device=self.device) < self.seqused_k[:, None]
        for tensor in (key, value):  # viewed as bytes, because float8 has no masked_fill_
            tensor.view(torch.uint8).masked_fill_(~is_key[:, None, :, None], 0)
        starts_k = None
        if self.cu_seqlens_q is not None:
            key, value = (each.transpose(0, 1).flatten(1, 2)[None] for each in (key, value))
            starts_k = _even_starts(sequences, key.shape[2], self.device)
        return replace(self, key=key, value=value, page_table=None, cu_seqlens_k=starts_k)

    def without_scales(self) -> AttentionCall:
        """Return the same call with true values, in float32 where they are in 8 bits."""
        changed: dict[str, Any] = dict.fromkeys(SCALES.values())
        for name, scale in SCALES.items():
            if (stored := getattr(self, name)).dtype.itemsize == 1:
                changed[name] = true_values(stored, getattr(self, scale), torch.float32)
        return replace(self, **changed)

    def without_gradients(self) -> AttentionCall:
        """Return the same call without the gradients of a recorded backward pass."""
        nothing: dict[str, Any] = dict.fromkeys(GRADIENT_FIELDS)
        return replace(self, **nothing)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that are not None, by field name."""
        named = {name: getattr(self, name) for name in TENSOR_FIELDS}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def with_tensors(self, tensors: dict[str, Tensor]) -> AttentionCall:
        """Return the same call with some tensors replaced, named as in `tensors()`."""
        return replace(self, **tensors)  # type: ignore[arg-type]


def _even_starts(sequences: int, total: int, device: torch.device) -> Tensor:
    """Return `cu_seqlens_k` for sequences of equal length, which together have `total` keys."""
    room = total // sequences
    return torch.arange(sequences + 1, dtype=torch.int32, device=device) * room


TENSOR_FIELDS = ("query", "key", "value", "attn_mask", "output", *VARIANT_TENSORS, *GRADIENT_FIELDS)
