"""Tensor maps, which a launch passes for tensor descriptors, kept for each address.

At each launch Triton searches all arguments for descriptors and has the driver encode each as a
tensor map. A map has 128 bytes: a tensor's address, sizes and strides, and the size of the blocks
that are loaded. It can be used again for another tensor that has come to lie at the same address.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

from attention_kernels.launch.descriptors import Address, at

MOST_KEPT = 1024
INSIDE = {"launcher", "tensordesc_indices", "tensordesc_meta"}
"""Variables of Triton's function that makes the maps and calls a launcher."""


class TensorMaps:
    """Tensor maps of a launch, whose descriptors differ between calls in their addresses only."""

    def __init__(
        self, descriptors: Sequence[tuple[int, Any]], make: Make, metadata: Sequence[Any]
    ) -> None:
        """Keep what the maps are made of.

        Args:
            descriptors: each with its place among the arguments.
            make: function of Triton's that encodes a descriptor.
            metadata: what else Triton knows of each descriptor.
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
        """Replace the address of each described tensor by the arguments that the compiled kernel
        takes."""
        # The last comes first, since a replacement moves later places.
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
"""Function that returns a descriptor's map, sizes and strides, from it and its metadata."""


def with_maps(
    run: Any, descriptors: Sequence[tuple[int, Any]]
) -> tuple[Callable[..., None], TensorMaps | None]:
    """Return a launcher of Triton's that takes maps, and the maps of its descriptors.

    Return the launcher itself and None where there are no descriptors, where the GPU has no TMA, or
    where this version of Triton builds launchers in another way.
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
