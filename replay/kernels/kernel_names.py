"""Names of kernels in arguments; splits and checks names without importing torch or a kernel."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

ENTRY_POINTS = "attention_replay.kernels"
"""Entry-point group through which installed packages offer kernels: `name = "module:function"`.

Decorating the function with `register_kernel` adds constraints.
"""

USER_MODULE = "attention_replay_user_"
"""Prefix of the module name under which a user's `file.py:function` is imported."""

_ADAPTERS = Path(__file__).with_name("adapters")


def parts(patterns: str) -> list[str]:
    """Split comma-separated names and globs, except at commas in brackets (options of variants)."""
    given = re.split(r",(?![^\[\]]*\])", patterns)
    return [part for part in map(str.strip, given) if part]


def look_known(patterns: str) -> bool:
    """Guess whether kernels with these names and globs exist; False for most misspelt names.

    The guess is True if the words of a name occur in the file of an adapter.
    """
    source = "\n".join(path.read_text("utf-8") for path in _ADAPTERS.glob("*.py")).lower()
    words = set(re.findall(r"[a-z0-9]+", source))
    doubtful = [part for part in parts(patterns) if part != "all" and not _looks_known(part, words)]
    if not doubtful:
        return True
    installed = importlib.metadata.entry_points(group=ENTRY_POINTS)
    return {*doubtful} <= {each.name for each in installed}


def _looks_known(part: str, words: set[str]) -> bool:
    if ".py:" in part:
        path, _, function = part.rpartition(":")
        try:
            return Path(path).is_file() and function in Path(path).read_text("utf-8")
        except (OSError, ValueError):
            return False
    if "*" in part or "?" in part:
        return True
    return {*re.findall(r"[^\W_]+", part.partition("[")[0])} <= words
