"""Imports our own `models` package under another name.

A user's project often has a `models` package too, and Python allows only one module per name. Our
package is loaded by its path, so that `import models` still imports the user's package.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

_NAME = "attention_replay_models"
USER_MODULE = "_attention_replay_user_"
"""Beginning of the name under which `models.userfunction` imports a user's file."""


def import_models() -> ModuleType:
    """Import the package in `models/`, next to `capture/`."""
    if _NAME not in sys.modules:
        directory = Path(__file__).resolve().parents[1] / "models"
        spec = importlib.util.spec_from_file_location(
            _NAME, directory / "__init__.py", submodule_search_locations=[str(directory)]
        )
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[_NAME] = module
        spec.loader.exec_module(module)
    return sys.modules[_NAME]
