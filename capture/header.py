"""What a file's header and the manifest say of a call: everything except its tensors."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch

from capture.call import Origin
from capture.shape import Shape
from capture.strides import Layout


@dataclass(frozen=True)
class Header:
    """Everything about a call except its tensors; stored in its file and in the manifest."""

    origin: Origin
    is_causal: bool
    scale: float | None
    enable_gqa: bool
    dropout_p: float
    dtypes: dict[str, str]
    layouts: dict[str, Layout]
    mask_is_noop: bool = False
    """The mask masks nothing (all True, or all zero): it costs time but changes no value."""

    @property
    def shape(self) -> Shape:
        batch, q_heads, q_len, head_dim = self.layouts["query"].size
        _, kv_heads, kv_len, _ = self.layouts["key"].size
        v_head_dim = self.layouts["value"].size[3]
        return Shape(batch, q_heads, kv_heads, q_len, kv_len, head_dim, v_head_dim)

    @property
    def dtype(self) -> str:
        """The query's dtype, e.g. `bfloat16`."""
        return self.dtypes["query"]

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Header:
        known = {item.name for item in fields(Origin)}
        header = cls(
            origin=Origin(
                **{name: value for name, value in data["origin"].items() if name in known}
            ),
            is_causal=data["is_causal"],
            scale=data["scale"],
            enable_gqa=data["enable_gqa"],
            dropout_p=data["dropout_p"],
            dtypes=data["dtypes"],
            layouts={
                name: Layout(tuple(layout["size"]), tuple(layout["stride"]))
                for name, layout in data["layouts"].items()
            },
            mask_is_noop=data["mask_is_noop"],
        )
        _ = header.shape  # fail here, not later, if a size is missing
        return header


def dtype_name(dtype: torch.dtype) -> str:
    """Return `bfloat16` for `torch.bfloat16`."""
    return str(dtype).removeprefix("torch.")
