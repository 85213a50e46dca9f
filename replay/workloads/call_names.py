"""Choice of calls by name. Imports no torch."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Collection, Sequence

from capture.errors import DatasetError


def chosen_names(names: Sequence[str], patterns: str, others: Collection[str] = ()) -> set[str]:
    """Return the names that match any of the comma-separated patterns, which are names or globs.

    Args:
        others: further names that a pattern may match, but that are neither returned nor suggested.

    Raises:
        DatasetError: a pattern matches no name.
    """
    found: set[str] = set()
    for pattern in [patterns] if patterns in names else patterns.split(","):
        matching = _matching(names, pattern.strip())
        if not matching and not _matching(others, pattern.strip()):
            near = difflib.get_close_matches(pattern, names, n=1)
            hint = f"did you mean {near[0]}?" if near else f"the first is {names[0]}"
            raise DatasetError(f"no call {pattern.strip()!r} was recorded: {hint}")
        found.update(matching)
    return found


def _matching(names: Collection[str], pattern: str) -> list[str]:
    return [name for name in names if fnmatch.fnmatchcase(name, pattern)]
