"""The interpreters of other Python environments, from options or a file.

This module does not import torch.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from attention_replay.errors import Error
from capture.storage.toml_data import read_tables
from replay.rows.row import HERE


class WorkerError(Error):
    """Error for an unusable environment; the message names the remedy."""


def interpreters(options: Sequence[str], *, are_here: bool = True) -> dict[str, str]:
    """Return interpreters, keyed by the name of their environment.

    Args:
        options: `NAME=PYTHON`, or a TOML file that has a table `[environments]` with lines
            `name = "path/to/python"`. `NAME=PYTHON` takes precedence over a file.
        are_here: whether the interpreters are on this machine.

    Raises:
        WorkerError: an option or a file has a wrong form, or an interpreter is missing.
    """
    found: dict[str, str] = {}
    given: dict[str, str] = {}
    for option in options:
        name, _, python = option.partition("=")
        if option.endswith(".toml"):
            found.update(_from_toml(Path(option)))
        elif not name or not python:
            raise WorkerError(f"--env {option}: write NAME=PATH/TO/python, or name a .toml file")
        elif given.setdefault(name, python) != python:
            raise WorkerError(f"--env gives {name} to two Pythons: choose two names")
    found.update(given)
    for name, python in found.items():
        found[name] = python = os.path.expanduser(python)  # the shell does not expand `~` here
        if name == HERE:
            raise WorkerError(f"{HERE!r} is the name of this environment: choose another name")
        if are_here and shutil.which(python) is None:
            raise WorkerError(f"--env {name}: there is no Python at {python}")
    return found


def _from_toml(path: Path) -> dict[str, str]:
    table = read_tables(path, WorkerError).get("environments")
    if not isinstance(table, dict) or not all(isinstance(value, str) for value in table.values()):
        raise WorkerError(f'{path}: needs [environments] with lines name = "path/to/python"')
    return table
