"""The models that have a name: one file a family, found by what it declares.

To add one, write a file with the three things of `Family`. These files are imported to list the
names, as ``--help`` does, so they import torch and the libraries inside of functions.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

from ..libraries import Library, Version
from ..runnable import Runnable

if TYPE_CHECKING:
    from ..request import Request


class Family(Protocol):
    """What each file in this folder has.

    Attributes:
        NAMES: What a user calls each model of the family, and what it is, in a line.
        NEEDS: The oldest versions of the libraries that build it.
    """

    NAMES: Mapping[str, str]
    NEEDS: Mapping[Library, Version]

    def build(self, request: Request) -> Runnable:
        """The model ``request.name`` as ``request`` wants it."""


def families() -> dict[str, Family]:
    """The family of each name, in the order of the files."""
    found: dict[str, Family] = {}
    for file in pkgutil.iter_modules(__path__):
        family: Any = import_module(f".{file.name}", __package__)
        found |= dict.fromkeys(family.NAMES, family)
    return found
