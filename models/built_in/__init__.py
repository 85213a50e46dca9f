"""The named models: one file per family, found by what it declares.

To add one, write a file with the three members of `Family`. These files are imported to list the
names, e.g. by ``--help``, so they import torch and the libraries inside functions.
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
    """The members of each file in this folder.

    Attributes:
        NAMES: The name of each model of the family, with a one-line description.
        NEEDS: The oldest versions of the libraries that build it.
    """

    NAMES: Mapping[str, str]
    NEEDS: Mapping[Library, Version]

    def build(self, request: Request) -> Runnable:
        """Build the model ``request.name`` as requested."""


def families() -> dict[str, Family]:
    """Return the family of each name, in the order of the files."""
    found: dict[str, Family] = {}
    for file in pkgutil.iter_modules(__path__):
        family: Any = import_module(f".{file.name}", __package__)
        found |= dict.fromkeys(family.NAMES, family)
    return found
