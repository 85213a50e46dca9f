"""Modules that strings of `replay` name exist."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path

import replay

FOLDER = Path(replay.__file__).parent
MODULE = re.compile(r"(?:replay|capture|attention_kernels)(?:\.[a-z_]\w*)+")
LEAST_FOUND = 20


def test_modules_in_strings_exist() -> None:
    named = {name: path for path in FOLDER.rglob("*.py") for name in _modules_in_strings(path)}
    assert len(named) >= LEAST_FOUND
    assert not {name: path for name, path in named.items() if not _exists(name)}


def _modules_in_strings(path: Path) -> set[str]:
    """Return dotted names of modules in strings, which renaming tools miss."""
    nodes = ast.walk(ast.parse(path.read_text("utf-8")))
    strings = (node.value for node in nodes if isinstance(node, ast.Constant))
    return {value for value in strings if isinstance(value, str) and MODULE.fullmatch(value)}


def _exists(name: str) -> bool:
    module, _, attribute = name.rpartition(".")
    if importlib.util.find_spec(module) is None:
        return False
    return importlib.util.find_spec(name) is not None or hasattr(
        importlib.import_module(module), attribute
    )
