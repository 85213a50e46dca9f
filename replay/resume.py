"""Continues an interrupted replay from the JSON Lines file that it was writing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from replay.registry import Kernel
from replay.results import Row, row_from_json
from replay.workloads import Workload


def finished_rows(
    path: Path, workloads: Sequence[Workload], kernels: Sequence[Kernel]
) -> tuple[list[Row], list[Workload]]:
    """The rows of the calls that are complete in a file, and the calls that are not.

    A call is complete when every kernel has a row; the others are replayed whole, because their
    speed-ups must be paired with a baseline of the same rounds. A last line that was cut off counts
    as not written.

    Raises:
        ValueError: the file holds something other than rows.
    """
    rows: dict[str, list[Row]] = {}
    lines = path.read_text().splitlines() if path.exists() else []
    for number, line in enumerate(lines, start=1):
        try:
            row = row_from_json(json.loads(line))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if number == len(lines):
                break
            raise ValueError(f"{path}, line {number}: not a row of `replay --json`") from error
        rows.setdefault(row.call.name, []).append(row)
    wanted = {kernel.name for kernel in kernels}
    complete = {
        name for name, members in rows.items() if wanted <= {member.kernel for member in members}
    }
    kept = [row for each in workloads if each.name in complete for row in rows[each.name]]
    return kept, [each for each in workloads if each.name not in complete]
