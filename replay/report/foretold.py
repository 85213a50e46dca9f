"""Foretold drift for people: a table of kernels, and a paragraph on where a plan loses quality."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from capture.text.counted import counted
from capture.text.printable import printable
from replay.report.fitted import FittedTable

if TYPE_CHECKING:
    from replay.sketches.foretold_drift import ForetoldDrift
    from replay.sketches.sketch import ErrorSketch

SHOWN = 3
"""Largest number of layers that are named."""


def print_foretold(sketch: ErrorSketch, console: Console) -> None:
    """Print the foretold drift of each kernel if it ran everywhere."""
    from replay.sketches.worst_places import foretold_drift

    places, prompts = len(sketch.places), len({*sketch.prompt_of})
    title = (
        f"{sketch.model} · {counted(places, 'place')} · foretold from "
        f"{counted(prompts, 'prompt')}, {sketch.runs} passes"
    )
    console.print(Text(printable(title), "bold"))
    table = FittedTable("kernel")
    table.add_column("everywhere", justify="right", no_wrap=True)
    table.add_column("most of it from", overflow="fold")
    for kernel in sketch.kernels:
        found = foretold_drift(sketch, lambda *place, name=kernel: name)
        table.add_row(Text(kernel), str(found), Text(printable(_largest(found.by_module))))
    console.print(table)


def quality_paragraph(kernel: str, found: ForetoldDrift) -> str:
    """Tell which layers and steps carry a foretold drift, and what keeping the worst exact gains.

    Args:
        kernel: name of the kernel or the plan.
    """
    sentences = [f"{kernel}, quality: the sketch foretells {found}."]
    if found.by_module:
        sentences.append(
            f"Layers that carry most of the squared error: {_largest(found.by_module)}."
        )
    if len(found.by_step) > 1:
        sentences.append(f"By step, from the first: {_by_step(found.by_step)}.")
    if found.error_without is not None:
        costs = "" if found.costs_ms is None else f"costs {found.costs_ms:.3g} ms of a run and "
        sentences.append(
            f"Keeping the worst {len(found.worst)} places exact ({'; '.join(found.worst)}) "
            f"{costs}leaves {found.without}."
        )
    return " ".join(sentences)


def _largest(shares: Mapping[str, float]) -> str:
    ranked = sorted(shares.items(), key=lambda item: -item[1])[:SHOWN]
    return ", ".join(f"{name or 'the model'} {100 * share:.0f} %" for name, share in ranked)


def _by_step(shares: Mapping[str, float]) -> str:
    """Name the shares of the steps; many steps are joined into ten ranges."""
    steps = list(shares.items())
    size = -(-len(steps) // 10)
    parts = []
    for part in (steps[at : at + size] for at in range(0, len(steps), size)):
        first, last = part[0][0], part[-1][0]
        name = first if first == last else f"{first}-{last}"
        parts.append(f"{name}: {100 * sum(share for _, share in part):.0f} %")
    return ", ".join(parts)
