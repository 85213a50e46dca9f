"""First sentence of a report on a group of calls, which names the fastest kernels."""

from __future__ import annotations

from replay.report.cells import speedup_text
from replay.report.groups import Group
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
            more = f" and {len(best.ties) - 2} more" if len(best.ties) > 2 else ""
            text += f" (ties with {', '.join(map(str, best.ties[:2]))}{more})"
        found.append(text)
    return "; ".join(found) or "no kernel was both timed and correct"
