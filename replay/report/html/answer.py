"""First sentence of a report on a group of calls, which names the fastest kernels."""

from __future__ import annotations

from replay.report.cells import speedup_text
from replay.report.groups import Group, first_few
from replay.report.ranking import fastest


def fastest_kernels(group: Group) -> str:
    """Return `fastest exact kernel: triton-fa3, 1.13× (1.12-1.14) vs torch-default; fastest …`.

    Classes without a timed and correct kernel are left out.
    """
    found = []
    for accuracy_class in ("exact", "quantised"):
        best = fastest(group, accuracy_class)
        if best is None:
            continue
        text = f"fastest {accuracy_class} kernel: {best.kernel}"
        if best.speedup is not None:
            text += f", {speedup_text(best.speedup)} vs {group.baseline}"
        elif best.kernel.name == group.baseline:
            text += ", the baseline"
        if best.ties:
            text += f" (ties with {first_few(list(map(str, best.ties)), 2)})"
        found.append(text)
    return "; ".join(found) or "no kernel was both timed and correct"
