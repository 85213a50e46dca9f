"""NaN and infinite elements of tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

_WITH_MINUS_INFINITY = ("attn_mask", "sinks")
"""Tensors in which -inf is an ordinary value."""


def is_finite(tensor: Tensor) -> bool:
    """Return True if no element is NaN or infinite; waits for the tensor's device."""
    return bool((tensor.float() if tensor.itemsize == 1 else tensor).isfinite().all())


def nonfinite_counts(tensor: Tensor, name: str) -> tuple[int, int]:
    """Count the NaN and the infinite elements, without the -inf of a mask or of sinks.

    Args:
        name: field of an `AttentionCall` that holds the tensor.
    """
    if not tensor.is_floating_point() or is_finite(tensor):
        return 0, 0
    tensor = tensor.float() if tensor.itemsize == 1 else tensor
    infinite = tensor == math.inf if name in _WITH_MINUS_INFINITY else tensor.isinf()
    return int(tensor.isnan().sum()), int(infinite.sum())


def counted_nonfinite(nan: int, infinite: int) -> str:
    """Format counts as `12 NaN and 3 infinite`, without a count of 0."""
    counts = ((nan, "NaN"), (infinite, "infinite"))
    return " and ".join(f"{count:,} {kind}" for count, kind in counts if count)


@torch.no_grad()
def nonfinite_tensors(tensors: Mapping[str, Tensor]) -> str:
    """Return the counts of a call's tensors, such as `value 12 NaN`; empty if all are finite.

    Keys and values that `seqused_k` leaves out may be memory that was never written, so a call with
    such lengths is judged by its query and output.
    """
    unused = ("key", "value", "attn_mask") if "seqused_k" in tensors else ()
    found = (
        (name, nonfinite_counts(tensor, name))
        for name, tensor in tensors.items()
        if name not in unused
    )
    return ", ".join(
        f"{name} {counted_nonfinite(*counts)}" for name, counts in found if any(counts)
    )
