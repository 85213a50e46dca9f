"""Names in `attention_replay` are lazy, documented and typed, and defined in other modules."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
import typing
from pathlib import Path
from types import ModuleType

import pytest
import torch

import attention_replay as ar
import capture
import replay

PACKAGES = (ar, capture, replay)
TYPES = {
    "Applied",
    "AttentionCall",
    "Dataset",
    "Error",
    "Kernel",
    "Plan",
    "Recording",
    "Row",
    "Rows",
    "Tuning",
}
FUNCTIONS = sorted(set(ar.__all__) - TYPES - {"__version__"})

packages = pytest.mark.parametrize("package", PACKAGES, ids=lambda each: each.__name__)


def imported_for_types(module: ModuleType) -> dict[str, str]:
    assert module.__file__ is not None
    return {
        alias.name: node.module
        for block in ast.parse(Path(module.__file__).read_text("utf-8")).body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom) and node.module is not None
        for alias in node.names
    }


@packages
def test_public_names_are_listed_once_and_are_no_modules(package: ModuleType) -> None:
    names = package.__all__
    assert sorted(names) == sorted(set(names))
    assert dir(package) == sorted(names)
    modules = {module.name for module in pkgutil.iter_modules(package.__path__)}
    assert not modules & {*names}
    lazy = [name for name in names if name not in ("Error", "__version__")]
    assert sorted(package._HOMES) == sorted(lazy)
    for name in lazy:
        home = importlib.import_module(package._HOMES[name])
        assert getattr(package, name) is getattr(home, name)


@packages
def test_type_checkers_see_the_objects_that_programs_get(package: ModuleType) -> None:
    assert package.__file__ is not None
    assert imported_for_types(package) == package._HOMES
    assert Path(package.__file__).with_name("py.typed").is_file()


def test_importing_loads_neither_torch_nor_rich() -> None:
    program = (
        "import sys, attention_replay, capture, replay\n"
        "for package in (attention_replay, capture, replay): dir(package)\n"
        "print([name for name in ('torch', 'rich') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


@packages
def test_unknown_names_are_refused(package: ModuleType) -> None:
    name = package.__name__
    with pytest.raises(AttributeError, match=f"module '{name}' has no attribute 'nothing'"):
        package.nothing  # noqa: B018


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_are_documented_and_typed(name: str) -> None:
    function = getattr(ar, name)
    text = inspect.getdoc(function)
    assert text is not None
    for heading in ("Args", r"(Returns|Yields)", "Raises", "Example"):
        assert re.search(rf"^{heading}:$", text, re.MULTILINE), f"no {heading}"
    written = inspect.unwrap(function)
    for_types = imported_for_types(sys.modules[written.__module__])
    names = {each: getattr(importlib.import_module(home), each) for each, home in for_types.items()}
    hints = typing.get_type_hints(written, localns={"torch": torch, **names})
    assert hints.keys() == {*inspect.signature(written).parameters, "return"}


@pytest.mark.parametrize("name", sorted(TYPES))
def test_types_are_documented(name: str) -> None:
    found = getattr(ar, name)
    assert isinstance(found, type)
    assert inspect.getdoc(found)
    assert not (found.__doc__ or "").startswith(f"{name}(")  # made by dataclasses
