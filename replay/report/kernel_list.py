"""Tables of the kernels that can run on this machine, and of the other kernels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.text import Text

from capture.text.counted import counted
from capture.text.printable import printable
from replay.kernels.registry import Kernel
from replay.report.fitted import FittedTable
from replay.report.groups import names_by_sentence
from replay.workers.environments import ProbeResult


def print_kernels(
    kernels: Sequence[Kernel],
    variants: Sequence[Kernel],
    found: Mapping[str, Mapping[str, ProbeResult]],
    console: Console,
) -> None:
    """Print a table of the kernels that can run, and one of the others, grouped by reason.

    Args:
        variants: kernels that are variants of other kernels, with different options.
        found: finding on whether a kernel can run, by environment and kernel.
    """
    counts = Counter(kernel.variant_of for kernel in variants)
    able = [
        kernel
        for kernel in kernels
        if any(each[kernel.name].reason is None for each in found.values())
    ]
    if able:
        console.print(Text("can run here", "bold green"))
        table = FittedTable("kernel", "version", "about")
        for kernel in able:
            notes = [] if kernel.default else ["not by default"]
            if kernel.differentiable:
                notes.append("has a backward")
            if counts[kernel.name]:
                notes.append(counted(counts[kernel.name], "variant"))
            about = f"{kernel.about} ({', '.join(notes)})" if notes else kernel.about
            table.add_row(*map(Text, (kernel.name, _versions(kernel, found), about)))
        console.print(table)
    reasons = names_by_sentence(
        (kernel.name, f"{environment}: {reason}" if len(found) > 1 else reason)
        for environment, findings in found.items()
        for kernel in kernels
        if (reason := _reason(findings[kernel.name]))
    )
    if reasons:
        console.print(Text("\ncannot run here" if able else "cannot run here", "bold yellow"))
        table = FittedTable("reason", "kernels")
        for reason, names in reasons.items():
            table.add_row(Text(printable(reason), "yellow"), Text(names))
        console.print(table)


def _versions(kernel: Kernel, found: Mapping[str, Mapping[str, ProbeResult]]) -> str:
    """List the version in each environment that can run a kernel: `this 2.13.0, fa4 2.11.0`."""
    versions = {
        name: findings[kernel.name].version
        for name, findings in found.items()
        if findings[kernel.name].reason is None
    }
    if len(found) == 1:
        return next(iter(versions.values()))
    return ", ".join(f"{name} {version}".strip() for name, version in versions.items())


def _reason(found: ProbeResult) -> str:
    """Return the reason why a kernel cannot run, with an install command; empty if it can."""
    reason = found.reason or ""
    # The reason may already contain the install command.
    missing = reason.startswith("not installed") and found.install not in reason
    return f"{reason}: {found.install}" if missing else reason
