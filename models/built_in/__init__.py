"""Named models, with one file per family.

To add a family, write a file with the three members of `Family`. To list the names, e.g. for
``--help``, all these files are imported, so each imports torch and libraries inside functions.
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
    """Members of each file in this folder.

    Attributes:
        NAMES: The name of each model of the family, with a one-line description.
        NEEDS: The oldest supported versions of the libraries that build the models.
    """

    NAMES: Mapping[str, str]
    NEEDS: Mapping[Library, Version]

    def build(self, request: Request) -> Runnable:
        """Build the model ``request.name`` as requested."""


def families() -> dict[str, Family]:
    """Return the family of each model name, in the order of the files."""
    found: dict[str, Family] = {}
    for file in pkgutil.iter_modules(__path__):
        family: Any = import_module(f".{file.name}", __package__)
        found |= dict.fromkeys(family.NAMES, family)
    return found
