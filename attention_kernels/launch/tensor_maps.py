"""What a launch passes for a tensor descriptor, kept for each address.

At each launch Triton goes through all arguments for descriptors and has the driver encode each as a
tensor map, 128 bytes that say where a tensor lies, its sizes and strides, and what of it is loaded
at a time. A map holds nothing else, so one of the same address does for another tensor that has
come to lie there.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

from attention_kernels.launch.descriptors import Address, at

MOST_KEPT = 1024
INSIDE = {"launcher", "tensordesc_indices", "tensordesc_meta"}
"""What Triton's function around a launcher, which makes the maps, refers to."""


class TensorMaps:
    """Of a launch, whose descriptors differ from call to call in their addresses only."""

    def __init__(
        self, descriptors: Sequence[tuple[int, Any]], make: Make, metadata: Sequence[Any]
    ) -> None:
        """Keep what they are made of.

        Args:
            descriptors: with their places among the arguments.
            metadata: what Triton knows of each besides.
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
        """Put what the compiled kernel takes in the place of what descriptors describe."""
        for place, descriptor, metadata, kept in self._of_each:  # from the last one
            address = addresses[place]
            arguments = kept.get(address)
            if arguments is None:
                if len(kept) >= MOST_KEPT:
                    kept.clear()
                arguments = self._make(at(descriptor, Address(address)), metadata)
                kept[address] = arguments
            addresses[place : place + 1] = arguments


Make = Callable[[Any, Any], list[Any]]
"""A descriptor's map, sizes and strides, as arguments, from it and its metadata."""


def with_maps(
    run: Any, descriptors: Sequence[tuple[int, Any]]
) -> tuple[Callable[..., None], TensorMaps | None]:
    """A launcher of Triton's that is to be given maps, and those of its descriptors.

    It is the launcher itself, without maps, where there are no descriptors, where the GPU takes
    none, or where this Triton puts its launchers together in another way.
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
