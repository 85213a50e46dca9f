"""Tensor maps, which a launch passes in place of tensor descriptors, cached by address.

At each launch, Triton searches all arguments for descriptors, and the driver encodes each
descriptor as a tensor map. A map has 128 bytes: a tensor's address, sizes and strides, and the size
of the blocks that are loaded. A map can be reused for another tensor at the same address.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

from attention_kernels.launch.descriptors import Address, at

MOST_KEPT = 1024
INSIDE = {"launcher", "tensordesc_indices", "tensordesc_meta"}
"""Variables of the Triton function that makes the maps and calls a launcher."""


class TensorMaps:
    """Tensor maps of a launch whose descriptors differ only in their addresses from call to
    call."""

    def __init__(
        self, descriptors: Sequence[tuple[int, Any]], make: Make, metadata: Sequence[Any]
    ) -> None:
        """Store the inputs from which maps are made.

        Args:
            descriptors: descriptors, each with its position among the arguments.
            make: Triton's function that encodes a descriptor.
            metadata: Triton's metadata of each descriptor.
        """
        self._make = make
        kept: list[dict[int, list[Any]]] = [{} for _ in descriptors]
        self._of_each = [
            (place, descriptor, of_it, arguments)
            for (place, descriptor), of_it, arguments in zip(
                descriptors, metadata, kept, strict=True
            )
        ][::-1]

    def replace(self, addresses: list[Any]) -> None:
        """Replace the address of each described tensor by the arguments of the compiled kernel."""
        # The last descriptor is replaced first, because a replacement shifts later positions.
        for place, descriptor, metadata, kept in self._of_each:
            address = addresses[place]
            arguments = kept.get(address)
            if arguments is None:
                if len(kept) >= MOST_KEPT:
                    kept.clear()
                arguments = self._make(at(descriptor, Address(address)), metadata)
                kept[address] = arguments
            addresses[place : place + 1] = arguments


Make = Callable[[Any, Any], list[Any]]
"""Function that returns a descriptor's map, sizes and strides, given the descriptor and its
metadata."""


def with_maps(
    run: Any, descriptors: Sequence[tuple[int, Any]]
) -> tuple[Callable[..., None], TensorMaps | None]:
    """Return a Triton launcher that accepts maps, and the maps of its descriptors.

    Return `run` itself and None if there are no descriptors, if the GPU has no TMA, or if this
    version of Triton builds launchers differently.
    """
    wrapper = getattr(run, "launch", None)
    code, expand = getattr(wrapper, "__code__", None), None
    if wrapper is not None and code is not None and set(code.co_freevars) == INSIDE:
        expand = wrapper.__globals__.get("make_tensordesc_arg")
    if not descriptors or wrapper is None or code is None or expand is None:
        return run, None
    cells = [cell.cell_contents for cell in wrapper.__closure__]
    inside = dict(zip(code.co_freevars, cells, strict=True))
    if inside["tensordesc_indices"] != {place for place, _ in descriptors}:
        return run, None
    unwrapped = copy.copy(run)
    unwrapped.launch = inside["launcher"]
    return unwrapped, TensorMaps(descriptors, expand, inside["tensordesc_meta"])
