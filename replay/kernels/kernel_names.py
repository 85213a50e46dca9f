"""Names of kernels in arguments; splits and checks names without importing torch or a kernel."""

from __future__ import annotations

import ast
import fnmatch
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
    """Split comma-separated names and globs, except at commas in brackets (options of variants).

    A glob of a user's file, `FILE.py:GLOB`, becomes the names of the kernels that it registers.
    """
    given = re.split(r",(?![^\[\]]*\])", patterns)
    return [name for part in map(str.strip, given) if part for name in _of_file(part)]


def shortened(name: str) -> str:
    """Return a name for people: `sparse[keep=0.2/1/0.5]` becomes `sparse[keep by head]`."""
    return re.sub(r"(\w+)=[^,/\]]+/[^,\]]+(?=[,\]])", r"\1 by head", name)


def registrations(path: str | Path) -> dict[str, str]:
    """Return the functions that a file decorates with `register_kernel`, by kernel.

    The file is not imported. Kernels whose names are computed are missing, and so are all kernels
    of a file that cannot be parsed.
    """
    try:
        nodes = list(ast.walk(ast.parse(Path(path).read_bytes())))
    except (OSError, SyntaxError, ValueError, RecursionError):
        return {}
    return {
        str(decorator.args[0].value): node.name
        for node in nodes
        if isinstance(node, ast.FunctionDef)
        for decorator in node.decorator_list
        if isinstance(decorator, ast.Call)
        and ast.unparse(decorator.func).endswith("register_kernel")
        and decorator.args
        and isinstance(decorator.args[0], ast.Constant)
    }


def function_of(path: str | Path, name: str) -> str:
    """Return the function that a user's kernel `path:name` means, which may be registered so."""
    return registrations(path).get(name, name)


def _of_file(part: str) -> list[str]:
    path, _, glob = part.rpartition(":")
    if not path.endswith(".py") or not re.search(r"[*?]", glob):
        return [part]
    found = fnmatch.filter(registrations(path), glob.replace("[", "[[]"))
    return [f"{path}:{name}" for name in found] or [part]


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
