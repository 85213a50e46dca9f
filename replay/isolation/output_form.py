"""The form of an output: type, shape, dtype and device, without regard to values."""

from __future__ import annotations

import torch
from torch import Tensor

from capture.call.attention_call import AttentionCall
from capture.storage.header import dtype_name


def malformed(output: object, call: AttentionCall, *, any_dtype: bool = False) -> str:
    """Return why an output is not a plain tensor of the right form; empty if the form is right.

    A subclass of `Tensor` is refused, because it may compute its values when they are read, after
    the clock has stopped.
    """
    expected = output_shape(call)
    if not isinstance(output, Tensor):
        return f"returned {type(output).__name__}, not a tensor"
    if type(output) is not Tensor or output.layout != torch.strided:
        kind = type(output).__name__ if type(output) is not Tensor else str(output.layout)
        return f"returned {kind}, not a plain tensor"
    if output.is_neg() or output.is_conj():
        return "returned a lazily negated or conjugated view, not a plain tensor"
    if output.requires_grad:
        return "returned a tensor that requires a gradient, not a plain tensor"
    if output.shape != expected:
        return f"returned shape {tuple(output.shape)}, expected {expected}"
    if output.device != call.device:
        return f"returned a tensor on {output.device}, expected {call.device}"
    if output.dtype != call.dtype and not any_dtype:
        return f"returned {dtype_name(output.dtype)}, expected {dtype_name(call.dtype)}"
    return ""


def output_shape(call: AttentionCall) -> tuple[int, int, int, int]:
    """Return the shape (B, Hq, Sq, Dv) of a call's output."""
    shape = call.shape
    return shape.batch, shape.q_heads, shape.q_len, shape.v_head_dim
