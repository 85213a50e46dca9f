"""Turns the arguments of a call into an `AttentionCall`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from capture.call.attention_call import AttentionCall, Origin
from capture.hooks.interceptor import Arguments
from capture.recording.paging import with_pages_read


def why_not_copied(arguments: Arguments) -> str:
    """Return why the tensors cannot be copied now; empty if they can."""
    on_gpu = arguments.query.device.type == "cuda"
    if on_gpu and torch.cuda.is_current_stream_capturing():
        return "while a CUDA graph is captured"
    tensors = [tensor for tensor in arguments if isinstance(tensor, Tensor)]
    for tensor in tensors:
        if reason := why_never_stored(tensor):
            return reason
    with_values = all(tensor.numel() == 0 or tensor.data_ptr() != 0 for tensor in tensors)
    return "" if with_values else "tensors without values"


def why_never_stored(tensor: Tensor) -> str:
    """Return why tensors of this kind have no memory of their own; empty if they may have."""
    if tensor.is_nested:
        return "nested tensors"
    if isinstance(tensor, FakeTensor):
        return "fake tensors"
    return "inside vmap or another transform of torch.func" if is_transformed(tensor) else ""


is_transformed = torch._C._functorch.is_functorch_wrapped_tensor
"""Return whether a tensor is wrapped by a transform of `torch.func`, such as vmap."""


def has_symbolic_sizes(*tensors: Tensor) -> bool:
    """Return whether a size is symbolic, so that one traced call represents many sizes."""
    return any(
        isinstance(size, torch.SymInt)
        for tensor in tensors
        if not tensor.is_nested
        for size in tensor.shape
    )


def as_call(arguments: Arguments, output: Tensor | None, origin: Origin) -> AttentionCall:
    """Build a call whose tensors have four dimensions, by merging SDPA's leading dimensions.

    A pool of pages is reduced to the pages that the call reads.
    """
    if arguments.page_table is not None:
        return with_pages_read(AttentionCall(**arguments.fields(), output=output, origin=origin))
    tensors = (arguments.query, arguments.key, arguments.value)
    leading = torch.broadcast_shapes(*(tensor.shape[:-3] for tensor in tensors))
    query, key, value = (_four_dims(tensor, leading) for tensor in tensors)
    mask = arguments.attn_mask
    given = arguments._replace(
        query=query,
        key=key,
        value=value,
        attn_mask=None if mask is None else _four_dims(mask, leading if len(leading) > 1 else ()),
        is_causal=bool(arguments.is_causal),
        enable_gqa=bool(arguments.enable_gqa),
    )
    output = None if output is None else _four_dims(output, leading)
    return AttentionCall(**given.fields(), output=output, origin=origin)


def _four_dims(tensor: Tensor, leading: Sequence[int]) -> Tensor:
    """Broadcast SDPA's leading dimensions, and flatten them into one."""
    while tensor.ndim < 4:
        tensor = tensor.unsqueeze(0)
    if leading:
        tensor = tensor.expand(*leading, *tensor.shape[-3:])
    return tensor.flatten(0, -4)
