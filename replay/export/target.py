"""Target, which is a library that runs a plan without this package."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from replay.plan.key_lengths import KernelsByLength
from replay.plan.plan import LayerChoice, Plan

OURS = {
    **dict.fromkeys(
        ("triton-fa2", "triton-fa3", "triton-masked", "triton-decode"), "attention_kernels"
    ),
    "triton-fp8": "attention_kernels_fp8",
    "triton-sage": "attention_kernels_int8",
}
"""Names that `attention_kernels.register` gives to our kernels in diffusers, transformers and
ComfyUI. The exact kernels share a name, because `attention_kernels.attention` chooses from them."""

KernelsAt = Mapping[Any, KernelsByLength]
"""Kernels in each place of a target; an empty name stands for the model's own attention."""

Ranges = Sequence[tuple[int, KernelsAt]]
"""First step of each range of denoising steps, in order, and the kernels there."""


@dataclass(frozen=True)
class Target:
    """Library to which plans are exported."""

    name: str
    kernels: Mapping[str, str]
    """Names in this library of the kernels that it has."""
    place: Callable[[LayerChoice], Hashable | None]
    """Function that returns where the library can have a kernel of its own for these calls. Choices
    with the same place share a kernel. The place is None if the library cannot address the
    calls."""
    joins: str
    """Description of choices that share a place, such as `all layers of a step`."""
    text: Callable[[Plan, Ranges, int | None], str]
    """Function that writes the kernels in the library's form. The last argument is the number of
    denoising steps, which only a target with `needs_number_of_steps` receives."""
    has_steps: bool = True
    """True if the kernel can depend on the denoising step."""
    has_lengths: bool = False
    """True if the kernel can depend on the key length."""
    needs_number_of_steps: bool = False
    adapt: Callable[[Plan, Target], tuple[Plan, Target]] = lambda plan, target: (plan, target)
    """Function that writes a plan in the target's terms, and chooses its places for this plan."""
    needs: Callable[[str], str] = lambda text: ""
    """Function that returns the version that an exported text needs; empty for any."""


def entries(places: KernelsAt, names: Mapping[str, str], indent: str) -> Iterator[str]:
    """Yield the lines of a Python dictionary of places with kernels.

    Each value is a list of the smallest key length of a kernel and the kernel's name in the
    library, the longest first.
    """
    for place, kernels in places.items():
        if any(kernel for _, kernel in kernels):
            named = [(length, names[kernel] if kernel else "") for length, kernel in kernels]
            yield f"{indent}{place!a}: {named!a},"


def loader(name: str, literal: str) -> str:
    """Return the text of a loader, which is a file in `loaders/`, with a plan in it.

    Args:
        literal: a Python literal that replaces the loader's empty plan.
    """
    text = (Path(__file__).with_name("loaders") / f"{name}.py").read_text("utf-8")
    before, empty, after = text.partition("\nPLAN: Plan = ")
    return before + empty + literal + after[after.index("\n") :]
