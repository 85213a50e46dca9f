"""Entry points of the commands `capture` and `replay`, with checks for name conflicts.

A user's files may have the same names as our packages `capture`, `replay` and `models`. If Python
found a user's `replay.py` first, the command would fail with a confusing ImportError. Therefore
this module has a unique name, and checks the packages before it imports them.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
from pathlib import Path

PACKAGES = {"capture": ("capture",), "replay": ("capture", "replay")}
"""Our packages that each command imports by name. `models` is loaded by its path instead."""

MAINS = {"capture": "capture.cli.main", "replay": "replay.cli.main"}
"""Module with the `main` function of each command."""


def capture() -> None:
    """Run the command `capture`."""
    _start("capture")


def replay() -> None:
    """Run the command `replay`."""
    _start("replay")


def _start(command: str) -> None:
    for package in PACKAGES[command]:
        if (hiding := _hiding(package)) is not None:
            _refuse(
                command,
                f"{hiding} hides the package {package!r} of attention-replay: rename it, or take "
                f"{hiding.parent} out of PYTHONPATH",
            )
    try:
        cli = importlib.import_module(MAINS[command])
    except KeyboardInterrupt:
        print(f"{command}: interrupted", file=sys.stderr)
        sys.exit(130)
    except ImportError as error:
        for package in PACKAGES[command]:
            if others := _also_installed_as(package):
                _refuse(
                    command,
                    f"{' and '.join(others)}, installed in the same environment, overwrote the "
                    f"package {package!r} of attention-replay ({error}): install one of them "
                    "elsewhere",
                )
        raise
    cli.main()


def _hiding(package: str) -> Path | None:
    """Return the path that Python finds instead of our package; None if it finds our package."""
    spec = importlib.util.find_spec(package)
    ours = Path(__file__).resolve().parents[1] / package
    if spec is None:
        return None  # missing; the import will raise an error
    directories = [Path(place).resolve() for place in spec.submodule_search_locations or ()]
    if ours in directories:
        return None
    return Path(spec.origin) if spec.origin else directories[0]


def _also_installed_as(package: str) -> list[str]:
    owners = importlib.metadata.packages_distributions().get(package, [])
    return sorted({owner for owner in owners if owner != "attention-replay"})


def _refuse(command: str, sentence: str) -> None:
    print(f"{command}: {sentence}", file=sys.stderr)
    sys.exit(2)
