"""Describes a call's mask, options and memory layout in words."""

from __future__ import annotations

import itertools

from capture.call.attention_variant import VARIANT_TENSORS
from capture.call.per_head import SCALES, scaled_text
from capture.call.strides import Layout
from capture.storage.header import CallHeader


def mask_text(header: CallHeader) -> str:
    """Describe the mask and the options: `causal`, `bool mask 1×1×64×64 = window 15/0`."""
    tensors = [name for name in VARIANT_TENSORS if name in header.layouts]
    asked = [str(header.variant), *(name for name in tensors if name not in SCALES.values())]
    if header.is_paged:
        pool, _, page_size, _ = header.layouts["key"].size
        asked = [f"{pool} pages of {page_size}" if each == "page_table" else each for each in asked]
    asked.append(scaled_text(header.layouts, header.dtypes["key"]))
    if header.value_in_key:
        asked.append(f"value = {header.value_in_key} columns of key")
    if "attn_mask" not in header.layouts:
        asked.insert(0, "causal" if header.is_causal else "")
        return ", ".join(filter(None, asked)) or "no mask"
    kind = "bool" if header.dtypes["attn_mask"] == "bool" else "float"
    size = "×".join(map(str, header.layouts["attn_mask"].size))
    structure = f" = {header.mask_structure}" if header.mask_structure else ""
    return ", ".join(filter(None, [f"{kind} mask {size}{structure}", *asked]))


def strides_text(header: CallHeader) -> str:
    """Describe each tensor's memory layout: `query BSHD, key and value BHSD`."""
    tensors: dict[str, list[str]] = {}
    for name in ("query", "key", "value"):
        if name in header.layouts:
            tensors.setdefault(_memory_order(header.layouts[name]), []).append(name)
    return ", ".join(f"{' and '.join(names)} {order}" for order, names in tensors.items())


def _memory_order(layout: Layout) -> str:
    """Return the memory order, such as `BHSD` if contiguous, or the strides if there are gaps.

    Dimensions of size 1 fit anywhere, so the first dense order is used.
    """
    for order in itertools.permutations(range(4)):
        expected, dense = 1, True
        for dim in reversed(order):
            if layout.size[dim] > 1:
                dense = dense and layout.stride[dim] == expected
                expected *= layout.size[dim]
        if dense:
            return "".join("BHSD"[dim] for dim in order)
    return f"strides {layout.stride}"
