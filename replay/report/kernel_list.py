"""List of kernels and of the environments in which each one can run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from capture.text.counted import counted
from replay.kernels.registry import Kernel
from replay.workers.environments import ProbeResult


def print_kernels(
    kernels: Sequence[Kernel],
    variants: Sequence[Kernel],
    found: Mapping[str, Mapping[str, ProbeResult]],
    console: Console,
) -> None:
    """Print each kernel, its number of variants, and the environments in which it can run.

    Args:
        variants: kernels that are variants of other kernels, with different options.
        found: finding on whether a kernel can run, by environment and kernel.
    """
    counts = Counter(kernel.variant_of for kernel in variants)
    for kernel in kernels:
        notes = [] if kernel.default else ["not by default"]
        if counts[kernel.name]:
            notes.append(counted(counts[kernel.name], "variant"))
        line = Text(kernel.name, "bold").append(f"  {kernel.about}", "not bold")
        console.print(line.append(f" ({', '.join(notes)})" if notes else "", "not bold"))
        for environment, findings in found.items():
            label = f"{environment}: " if len(found) > 1 else ""
            state = _state(findings[kernel.name])
            console.print(Padding(Text(label).append_text(state), (0, 0, 0, 4)))


def _state(found: ProbeResult) -> Text:
    if found.reason is None:
        return Text(f"available {found.version}".strip(), "green")
    # The reason may already contain the install command.
    missing = found.reason.startswith("not installed") and found.install not in found.reason
    return Text(f"{found.reason}: {found.install}" if missing else found.reason, "yellow")
