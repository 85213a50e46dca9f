"""Checks the installed versions of diffusers and transformers, and handles their differences."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from typing import Literal

from .errors import ModelError

Library = Literal["diffusers", "transformers"]
Version = tuple[int, int]
"""Major and minor version."""

DTYPE_SINCE: dict[Library, Version] = {"diffusers": (0, 40), "transformers": (4, 56)}
"""First version of each library whose `from_pretrained` takes `dtype`, not `torch_dtype`."""


def dtype_keyword(library: Library) -> str:
    """Return the name of the dtype argument of the library's `from_pretrained`."""
    installed = _numbers(importlib.metadata.version(library))
    return "dtype" if installed >= DTYPE_SINCE[library] else "torch_dtype"


def check(model: str, needs: Mapping[Library, Version]) -> None:
    """Check that the libraries are installed in versions that `model` supports."""
    for library, oldest in needs.items():
        required = ".".join(map(str, oldest))
        try:
            installed = importlib.metadata.version(library)
        except importlib.metadata.PackageNotFoundError:
            raise ModelError(
                f"{model} needs {library}, which is not installed: "
                f"pip install '{library}>={required}'"
            ) from None
        if _numbers(installed) < oldest:
            raise ModelError(
                f"{model} needs {library} {required} or newer, but {installed} is installed: "
                "upgrade it, or record a checkpoint directory (--model DIR) or your own function "
                "(--model FILE.py:FUNCTION), for which it is new enough"
            )


def is_failed_import(error: Exception) -> bool:
    """Return whether an error is a failed import; lazy imports may raise RuntimeError."""
    return isinstance(error, ImportError) or str(error).startswith("Failed to import ")


def not_importable(model: str, error: Exception) -> ModelError:
    """Return the error that a library for `model` is missing or cannot be imported."""
    if isinstance(error, ModuleNotFoundError) and error.name and "." not in error.name:
        package = {"PIL": "pillow", "google": "protobuf"}.get(error.name, error.name)
        return ModelError(f"{model} needs {package}, which is not installed: pip install {package}")
    versions = []
    for library in ("diffusers", "transformers"):
        try:
            versions.append(f"{library} {importlib.metadata.version(library)}")
        except importlib.metadata.PackageNotFoundError:
            versions.append(f"no {library}")
    reason = str(error).strip().partition("\n")[0]
    return ModelError(
        f"{' and '.join(versions)} cannot be imported together here ({reason}): install versions "
        "released at the same time, such as the newest of both"
    )


def _numbers(version: str) -> Version:
    major, minor, *_ = version.split(".")
    return int(major), int(minor)
