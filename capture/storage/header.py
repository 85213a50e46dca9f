"""Defines the header of a call: all its data except the tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from capture.call import pages
from capture.call.attention_call import TENSOR_FIELDS, AttentionCall, Origin
from capture.call.attention_variant import PLAIN, VARIANT_TENSORS, AttentionVariant
from capture.call.gradients import GRADIENTS
from capture.call.per_head import SCALES
from capture.call.shape import Shape
from capture.call.strides import Layout
from capture.storage.json_data import fields_of, required, with_names

SCORES_PER_BYTE = 1 << 14
"""Maximum number of attention scores per byte of a file. Calls of the longest videos have about
100 scores per byte; a call of a million tokens has about 4,000."""
HEADS_AT_LEAST = 1 << 16
"""Number of heads, over all batches, that any file may have. A file with more bytes may have
one head per byte."""
GAPS, GAPS_AT_LEAST = 64, 2 << 30
"""Maximum memory of a restored call: `GAPS` times its file's size, but at least `GAPS_AT_LEAST`
bytes. The first tokens in a cache for 32,768 tokens have gaps of a gigabyte."""

_NUMBERS = {"float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"}
_LENGTHS = {"int32", "int64"}
_IN_8_BITS = {"float8_e4m3fn", "float8_e5m2", "int8"}
_DIMENSIONS = {1: "one dimension", 2: "two dimensions"}
_DTYPES = {
    "attn_mask": _NUMBERS | {"bool"},
    "cu_seqlens_q": _LENGTHS,
    "cu_seqlens_k": _LENGTHS,
    "seqused_k": _LENGTHS,
    "page_table": _LENGTHS,
    **{name: {"float32"} for name in SCALES.values()},
}


@dataclass(frozen=True)
class CallHeader:
    """All data of a call except its tensors, stored in the call's file and in the manifest."""

    origin: Origin
    is_causal: bool
    scale: float | None
    enable_gqa: bool
    dropout_p: float
    dtypes: dict[str, str]
    layouts: dict[str, Layout]
    mask_structure: str = ""
    """Structure of the mask as text (`capture.call.mask_structure`); empty without a structure."""
    variant: AttentionVariant = PLAIN
    value_in_key: int = 0
    """Number of the key's first columns that form the value, if the value shares the key's memory
    and is not stored separately; otherwise 0."""

    @property
    def shape(self) -> Shape:
        batch, q_heads, q_len, head_dim = self.layouts["query"].size
        _, kv_heads, kv_len, _ = self.layouts["key"].size
        if self.is_paged:
            table, is_packed = self.layouts["page_table"].size[2:], "cu_seqlens_q" in self.layouts
            kv_len = pages.kv_len(table, kv_len, is_packed=is_packed)
        v_head_dim = self.value_in_key or self.layouts["value"].size[3]
        return Shape(batch, q_heads, kv_heads, q_len, kv_len, head_dim, v_head_dim)

    @property
    def is_paged(self) -> bool:
        """True if the key is a pool of pages."""
        return "page_table" in self.layouts

    @property
    def dtype(self) -> str:
        """Dtype of the output, such as `bfloat16` (`AttentionCall.dtype`)."""
        return "bfloat16" if "query_scale" in self.layouts else self.dtypes["query"]

    @classmethod
    def of(cls, call: AttentionCall) -> CallHeader:
        """Build the header of a call in memory, with the current layouts of its tensors."""
        tensors = stored_tensors(call)
        return cls(
            origin=call.origin,
            is_causal=call.is_causal,
            scale=call.scale,
            enable_gqa=call.enable_gqa,
            dropout_p=call.dropout_p,
            dtypes={name: dtype_name(tensor.dtype) for name, tensor in tensors.items()},
            layouts={name: Layout.of(tensor) for name, tensor in tensors.items()},
            variant=call.variant,
            value_in_key=0 if "value" in tensors else call.value.shape[-1],
        )

    @classmethod
    def from_json(cls, data: Any) -> CallHeader:
        """Read a header that `to_json` returned, possibly in a later version."""
        layouts = required(data, "layouts", dict[str, Any])
        origin = with_names(required(data, "origin", dict[str, Any]), {"road": "entry_point"})
        header = cls(
            origin=Origin(**fields_of(Origin, origin, ignore_unknown=True)),
            is_causal=required(data, "is_causal", bool),
            scale=required(data, "scale", float | None),
            enable_gqa=required(data, "enable_gqa", bool),
            dropout_p=required(data, "dropout_p", float),
            dtypes=required(data, "dtypes", dict[str, str]),
            layouts={name: Layout.from_json(layout) for name, layout in layouts.items()},
            mask_structure=required(data, "mask_structure", str),
            variant=AttentionVariant.from_json(data.get("variant", {})),
            value_in_key=required({"value_in_key": 0, **data}, "value_in_key", int),
        )
        if fault := header.fault():
            raise ValueError(fault)
        return header

    def to_json(self) -> dict[str, Any]:
        """Return the header as plain data, ten times as fast as `dataclasses.asdict`."""
        layouts = {name: vars(layout) for name, layout in self.layouts.items()}
        origin = with_names(vars(self.origin), {"entry_point": "road"})
        if self.origin.forward_index is None:  # the format of old recordings
            del origin["forward_index"]
        if not self.origin.nonfinite:
            del origin["nonfinite"]
        return {
            **vars(self),
            "origin": origin,
            "layouts": layouts,
            "variant": self.variant.arguments(),
        }

    def excess(self, nbytes: int) -> str:
        """Return which cost is out of proportion to a file of `nbytes`; empty if none.

        Even in a small file, a stride can span any amount of memory, and an expanded dimension can
        represent any number of elements.
        """
        batch, q_heads, _, q_len, kv_len, _, v_head_dim = self.shape
        if self.is_paged:  # a query only sees the keys of its own sequence
            table, page_size = self.layouts["page_table"].size[2:], self.layouts["key"].size[2]
            kv_len = pages.kv_len(table, page_size, is_packed=False)
        scores = batch * q_heads * q_len * kv_len
        if scores > SCORES_PER_BYTE * nbytes:
            return (
                f"{scores} attention scores in a file of {nbytes} bytes (limit: {SCORES_PER_BYTE} "
                "per byte)"
            )
        if batch * q_heads > max(nbytes, HEADS_AT_LEAST):
            return (
                f"{batch} × {q_heads} heads in a file of {nbytes} bytes (limit: one per byte, or "
                f"{HEADS_AT_LEAST})"
            )
        output = batch * q_heads * q_len * v_head_dim * getattr(torch, self.dtype).itemsize
        memory = output + sum(self._restored_bytes(name) for name in self.layouts)
        return memory_excess("its tensors", memory, nbytes)

    def _restored_bytes(self, name: str) -> int:
        layout = self.layouts[name]
        # Kernels read an expanded mask in place, but may copy other expanded tensors in full.
        elements = 0 if name == "attn_mask" else math.prod(layout.size)
        return max(layout.extent, elements) * getattr(torch, self.dtypes[name]).itemsize

    def fault(self) -> str:
        """Return why these fields cannot describe an attention call; empty if they can."""
        names = self.layouts.keys()
        needed = {"query", "key"} if self.value_in_key else {"query", "key", "value"}
        if not needed <= names <= set(TENSOR_FIELDS) or (self.value_in_key and "value" in names):
            return f"tensors {sorted(names)}"
        if names != self.dtypes.keys():
            return f"dtypes of {sorted(self.dtypes)} for tensors {sorted(names)}"
        for name, dtype in self.dtypes.items():
            is_scaled = SCALES.get(name) in names
            if dtype not in (_IN_8_BITS if is_scaled else _DTYPES.get(name, _NUMBERS)):
                return f"{name} of dtype {dtype[:40]!r}{' with a scale' if is_scaled else ''}"
        sizes = {name: layout.size for name, layout in self.layouts.items()}
        # A size of 0 must not hide the product of the others.
        if any(math.prod(max(each, 1) for each in size) >= 2**62 for size in sizes.values()):
            return "sizes that exceed any memory"
        if self.is_paged and (fault := self._pages_fault(sizes)):
            return fault
        batch, q_heads, kv_heads, q_len, kv_len, head_dim, v_head_dim = self.shape
        if not (batch and q_heads and kv_heads and head_dim and v_head_dim):
            return f"shape {self.shape}: only the lengths may be 0"
        if q_heads % kv_heads:
            return f"{q_heads} query heads for {kv_heads} key/value heads"
        if not 0 <= self.value_in_key <= head_dim:
            return f"value_in_key is {self.value_in_key}, but the key has {head_dim} columns"
        in_memory = (batch, kv_heads, kv_len)
        if self.is_paged:
            in_memory = (sizes["key"][0], kv_heads, sizes["key"][2])
        expected: dict[str, tuple[int, ...]] = {
            "key": (*in_memory, head_dim),
            "value": (*in_memory, v_head_dim),
            "output": (batch, q_heads, q_len, v_head_dim),
        }
        whole = {**sizes, **expected}
        expected |= {GRADIENTS[name]: whole[name] for name in GRADIENTS if name in whole}
        if strange := {GRADIENTS[name] for name in GRADIENTS if name not in whole} & names:
            return f"{min(strange)} without its tensor"
        for name, size in expected.items():
            if sizes.get(name, size) != size:
                return f"{name} of shape {sizes[name]}, but the other tensors require {size}"
        scores = (batch, q_heads, q_len, kv_len)
        mask = sizes.get("attn_mask", scores)
        if any(size not in (1, full) for size, full in zip(mask, scores, strict=True)):
            return f"attn_mask of shape {mask}, which does not broadcast to {scores}"
        if self.scale is not None and not math.isfinite(self.scale):
            return f"scale {self.scale}"
        if not 0 <= self.dropout_p <= 1:
            return f"dropout_p {self.dropout_p}"
        return self._variant_fault(sizes)

    def _variant_fault(self, sizes: dict[str, tuple[int, ...]]) -> str:
        """Return why the tensors that SDPA does not have do not fit; empty if they do."""
        given = {name: sizes[name] for name in VARIANT_TENSORS if name in sizes}
        for name, size in given.items():
            dimensions = VARIANT_TENSORS[name]
            if size[:-dimensions] != (1,) * (4 - dimensions):
                return f"{name} of shape {size}: it has {_DIMENSIONS[dimensions]}"
        lengths = {name: size[3] for name, size in given.items()}
        batch, q_heads, kv_heads = self.shape[:3]
        if lengths.get("sinks", q_heads) != q_heads:
            return f"{lengths['sinks']} sinks for {q_heads} query heads"
        for name in SCALES.values():
            if lengths.get(name, kv_heads) != kv_heads:
                return f"{name} of {lengths[name]} numbers for {kv_heads} key/value heads"
        packed = {"cu_seqlens_q", "cu_seqlens_k"} & given.keys()
        needed = {"cu_seqlens_q"} if self.is_paged else {"cu_seqlens_q", "cu_seqlens_k"}
        if packed and (packed != needed or batch != 1):
            return "packed sequences have a batch of 1, cu_seqlens_q and cu_seqlens_k"
        sequences = lengths["cu_seqlens_q"] - 1 if packed else batch
        if sequences < 1 or lengths.get("cu_seqlens_k", sequences + 1) != sequences + 1:
            return "cu_seqlens_q and cu_seqlens_k of different lengths"
        if lengths.get("seqused_k", sequences) != sequences:
            return f"{lengths['seqused_k']} lengths of keys for {sequences} sequences"
        if self.is_paged and sizes["page_table"][2] != sequences:
            return f"a page table of {sizes['page_table'][2]} rows for {sequences} sequences"
        return ""

    def _pages_fault(self, sizes: dict[str, tuple[int, ...]]) -> str:
        """Return why the key cannot be a pool of pages for the page table; empty if it can."""
        if "seqused_k" not in sizes:
            return "a page table without lengths of keys"
        if unfit := sizes.keys() & {"attn_mask", "cu_seqlens_k"}:
            return f"{min(unfit)} together with a page table"
        pool, _, page_size, _ = sizes["key"]
        if not (pool and page_size and sizes["page_table"][3]):
            return f"{pool} pages of {page_size} keys, {sizes['page_table'][3]} for each sequence"
        return ""


def memory_excess(what: str, memory: int, nbytes: int) -> str:
    """Return why a file of `nbytes` must not take this much memory; empty if it may."""
    if memory <= max(GAPS * nbytes, GAPS_AT_LEAST):
        return ""
    return (
        f"{what} take {memory} bytes of memory for a file of {nbytes} (limit: {GAPS} times the "
        f"file, or {GAPS_AT_LEAST})"
    )


def stored_tensors(call: AttentionCall) -> dict[str, Tensor]:
    """Return the tensors that a file stores, with leading dimensions of 1.

    A value that is part of the key is omitted.
    """
    tensors = call.tensors()
    if call.value_is_in_key:
        del tensors["value"]
    return {name: tensor[(None,) * (4 - tensor.ndim)] for name, tensor in tensors.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """Return `bfloat16` for `torch.bfloat16`."""
    return str(dtype).removeprefix("torch.")
