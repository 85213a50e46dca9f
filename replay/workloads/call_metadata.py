"""The facts about a call that are known before its tensors are read."""

from __future__ import annotations

from typing import NamedTuple

from capture.call.shape import Shape

ALIGNMENT = 16
"""Length whose multiples compilers compile separately from other lengths."""


class CallMetadata(NamedTuple):
    """Sizes of a call, and the place in a model that made it."""

    form: tuple[object, ...]
    """Values that are equal for two calls if most kernels compile only once for both calls (see
    `length_classes`)."""
    shape: Shape | None = None
    """Shape of the call; None if it is unknown until the tensors are loaded."""
    is_causal: bool = False
    model: str = ""
    phase: str = ""
    module: str = ""


def length_classes(shape: Shape) -> tuple[object, ...]:
    """Return the part of a call's form that its shape determines.

    The form depends on the binary order of magnitude of each length, and on its alignment.
    """
    lengths = shape.q_len, shape.kv_len
    classes = [(length.bit_length(), length % ALIGNMENT == 0) for length in lengths]
    return (*shape._replace(q_len=0, kv_len=0), *classes)
