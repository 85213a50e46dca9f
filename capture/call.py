"""The vocabulary: one call of `scaled_dot_product_attention`, and where it came from."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from capture.shape import Shape
from capture.strides import copy_with_strides


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
    """Position among *all* SDPA calls of the recording, from 0."""
    step: int = 0
    """Number of forward passes of the module's root before the one that made this call."""
    phase: str = ""
    """`denoise`, `prefill`, `decode` or `encode`."""
    device: str = "cpu"
    """Device the model ran on, with the name of a GPU: `cpu`, `cuda (NVIDIA H200)`."""
    seed: int | None = None
    rank: int | None = None
    """Of the process that made the call, where there were several."""
    backend: str = ""
    """The torch backend that produced the output, as a kernel name: `torch-flash` …"""
    disabled_backends: list[str] = field(default_factory=list)
    """Torch backends that were switched off when the model made the call (`sdpa_kernel`,
    `torch.backends.cuda.enable_flash_sdp(False)` …), as kernel names; empty for plain SDPA."""
    heads: str = ""
    """The query heads of the model's call that are stored, if not all: `0,2-3`."""
    versions: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class AttentionCall:
    """One call of SDPA: the arguments the model passed, and the output it got back.

    `query` is (B, Hq, Sq, D), `key` (B, Hkv, Sk, D), `value` (B, Hkv, Sk, Dv) and `output`
    (B, Hq, Sq, Dv). Tensors have the model's own shapes, dtypes **and strides**. `attn_mask`
    broadcasts to (B, Hq, Sq, Sk): bool (True = attend) or float (added to the scores). `scale=None`
    means 1/sqrt(D). `output` is None for synthetic calls and captures made with `output=False`.
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
    origin: Origin = field(default_factory=Origin)

    @property
    def shape(self) -> Shape:
        batch, q_heads, q_len, head_dim = self.query.shape
        kv_heads, kv_len = self.key.shape[1:3]
        return Shape(batch, q_heads, kv_heads, q_len, kv_len, head_dim, self.value.shape[3])

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
        """Keyword arguments that repeat the call: `F.scaled_dot_product_attention(**arguments)`."""
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
        return arguments

    def to(self, device: str | torch.device) -> AttentionCall:
        """Return the same call with every tensor on `device`, strides preserved."""
        return self.with_tensors(
            {name: copy_with_strides(tensor, device) for name, tensor in self.tensors().items()}
        )

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that are not None, by field name."""
        named = {name: getattr(self, name) for name in TENSOR_FIELDS}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def with_tensors(self, tensors: dict[str, Tensor]) -> AttentionCall:
        """Return the same call with some tensors replaced, named as in `tensors()`."""
        return replace(self, **tensors)  # type: ignore[arg-type]


TENSOR_FIELDS = ("query", "key", "value", "attn_mask", "output")
