"""Changes since the previous replay of the same calls, one line per kernel."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import geometric_mean

from capture.text.counted import counted
from capture.text.printable import printable
from replay.rows.row import Row

NOISE = " (same code: noise of the machine)"


def changes(before: Sequence[Row], after: Sequence[Row]) -> list[str]:
    """Return lines such as `mine.py:attention: 0.148 → 0.11 ms, inaccurate → ok`.

    For several calls, a line gives the geometric mean of the time ratios: `0.74 × the time`.
    Lines of kernels that are not in a user's file say that their code did not change.
    """
    rows = {(row.kernel, row.call.name): row for row in before}
    pairs: dict[str, list[tuple[Row, Row]]] = {}
    for row in after:
        if (earlier := rows.get((row.kernel, row.call.name))) is not None:
            pairs.setdefault(row.kernel, []).append((earlier, row))
    return [
        f"{printable(kernel)}: {_change(found)}{'' if '.py:' in kernel else NOISE}"
        for kernel, found in pairs.items()
    ]


def _change(pairs: Sequence[tuple[Row, Row]]) -> str:
    statuses = Counter(
        f"{one.status} → {other.status}" for one, other in pairs if one.status != other.status
    )
    several = len(pairs) > 1
    found = [
        f"{change} ({counted(count, 'call')})" if several else change
        for change, count in statuses.items()
    ]
    return ", ".join(filter(None, [_times(pairs), *found])) or "not timed, status unchanged"


def _times(pairs: Sequence[tuple[Row, Row]]) -> str:
    timed = [
        (one.time_ms.p50, other.time_ms.p50)
        for one, other in pairs
        if one.time_ms is not None and other.time_ms is not None
    ]
    if not timed:
        return ""
    if len(pairs) == 1:
        return f"{timed[0][0]:.4g} → {timed[0][1]:.4g} ms"
    mean = geometric_mean(other / one for one, other in timed)
    return f"{mean:.3g} × the time over {counted(len(timed), 'call')}"
