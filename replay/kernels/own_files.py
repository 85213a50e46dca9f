"""Files of a user's kernel: the kernel's file, and the files in its directory that it imports."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")
"""Name of a module that may be imported by a string; names without a file are ignored."""


def own_files(
    path: Path, root: Path, others: tuple[str, ...] = (), seen: set[Path] | None = None
) -> Iterator[tuple[str, Path]]:
    """Yield a file and the files below `root` that it imports, with their relative paths.

    Args:
        others: packages to leave out.
    """
    seen = set() if seen is None else seen
    if path in seen or not path.is_file():
        return
    seen.add(path)
    yield str(path.relative_to(root)), path
    for name in _imported(path, root):
        if name.parts and name.parts[0] not in others:
            yield from own_files(root / f"{name}.py", root, others, seen)
            yield from own_files(root / name / "__init__.py", root, others, seen)


def _imported(path: Path, root: Path) -> Iterator[Path]:
    """Yield the paths of a file's imports: `a/b` for `a.b`, although `b` may be a function."""
    folder = path.relative_to(root).parent.parts
    try:
        nodes = list(ast.walk(ast.parse(path.read_bytes())))
    except (OSError, SyntaxError, ValueError):
        return
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (Path(*alias.name.split(".")) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = Path(*folder[: len(folder) + 1 - node.level]) if node.level else Path()
            base = base.joinpath(*(node.module or "").split("."))
            yield from (base, *(base / alias.name for alias in node.names))
        elif isinstance(node, ast.Constant) and MODULE.fullmatch(str(node.value)):
            yield Path(*str(node.value).split("."))
