"""Users' functions that are registered as kernels, and their import by worker processes.

The parent hands the names to its children in an environment variable. Imports no torch.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from replay.kernels.declared_arguments import original
from replay.kernels.kernel_names import USER_MODULE, parts

VARIABLE = "ATTENTION_REPLAY_FUNCTIONS"
"""Environment variable with the functions that a worker's parent registered, as JSON."""


class Registered(NamedTuple):
    """Function that is registered as a kernel."""

    function: Callable[..., Any]
    has_limits: bool
    """True if the registration says more than the name of the kernel."""


class Received(NamedTuple):
    """Function that the parent of this process registered as a kernel."""

    address: str
    source: str
    has_limits: bool


functions: dict[str, Registered] = {}
"""Functions that this process registered, by kernel."""


def source_of(function: Callable[..., Any]) -> str:
    """Return the file or, failing that, the module that defines a function."""
    name = getattr(function, "__module__", None) or "__main__"
    path = getattr(sys.modules.get(name), "__file__", None)
    return str(Path(path).resolve()) if path else name


def address_of(function: Callable[..., Any]) -> str:
    """Return `MODULE:NAME` or `FILE.py:NAME`, from which a new process can import a function.

    The address is empty for lambdas, methods, functions inside others, and those of notebooks.
    """
    function = original(function)
    name, source = getattr(function, "__name__", ""), source_of(function)
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    if getattr(module, name, None) is not function or not Path(source).is_file():
        return ""
    found = getattr(getattr(module, "__spec__", None), "name", USER_MODULE)
    return f"{source if found.startswith(USER_MODULE) else found}:{name}"


def sources(patterns: str | None) -> list[str]:
    """Return the sources of the users' kernels among these names, before PyTorch is imported.

    Args:
        patterns: comma-separated names and globs. Globs are ignored, and None means no name.
    """
    found = []
    for name in parts(patterns or ""):
        file, _, _ = name.rpartition(":")
        if name in functions:
            found.append(source_of(functions[name].function))
        elif ".py:" in name and os.path.isfile(file):
            found.append(file)
    return list(dict.fromkeys(found))


def variables(python: str) -> Mapping[str, str]:
    """Return the environment variables that hand the registered functions to a worker."""
    received = {
        kernel: (address, source_of(function), has_limits)
        for kernel, (function, has_limits) in functions.items()
        if (address := address_of(function))
    }
    # Another interpreter must not see this interpreter's packages.
    folders = [os.path.abspath(path) for path in sys.path] if python == sys.executable else []
    return {VARIABLE: json.dumps({"folders": folders, "functions": received})}


def received() -> tuple[dict[str, Received], list[str]]:
    """Return the functions that the parent registered, by kernel, and its folders of modules."""
    given = json.loads(os.environ.get(VARIABLE, '{"folders": [], "functions": {}}'))
    return {name: Received(*each) for name, each in given["functions"].items()}, given["folders"]
