"""diffusers and transformers as installed here: which versions, and what changed between them."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from typing import Literal

from .errors import ModelError

Library = Literal["diffusers", "transformers"]
Version = tuple[int, int]
"""Major and minor."""

DTYPE_SINCE: dict[Library, Version] = {"diffusers": (0, 40), "transformers": (4, 56)}
"""Since when `from_pretrained` takes `dtype`; it took `torch_dtype` before."""


def dtype_keyword(library: Library) -> str:
    """What the library's `from_pretrained` calls the dtype of the weights."""
    installed = _numbers(importlib.metadata.version(library))
    return "dtype" if installed >= DTYPE_SINCE[library] else "torch_dtype"


def check(model: str, needs: Mapping[Library, Version]) -> None:
    """Refuse libraries that are missing, or too old for `model`, which needs these or newer ones.

    Raises:
        ModelError: with the library, the version that is needed and the one that is installed.
    """
    for library, oldest in needs.items():
        wanted = ".".join(map(str, oldest))
        try:
            installed = importlib.metadata.version(library)
        except importlib.metadata.PackageNotFoundError:
            raise ModelError(
                f"{model} needs {library}, which is not installed: "
                f"pip install '{library}>={wanted}'"
            ) from None
        if _numbers(installed) < oldest:
            raise ModelError(
                f"{model} needs {library} {wanted} or newer, and {installed} is installed: upgrade "
                "it, or record a checkpoint directory (--model DIR) or a function of yours "
                "(--model FILE.py:FUNCTION), which it is new enough for"
            )


def is_failed_import(error: Exception) -> bool:
    """Whether something could not be imported: the lazy imports of both raise RuntimeError too."""
    return isinstance(error, ImportError) or str(error).startswith("Failed to import ")


def not_importable(model: str, error: Exception) -> ModelError:
    """What to say where a library that builds `model` is missing or cannot be imported."""
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
        "of one time, say the newest of both"
    )


def _numbers(version: str) -> Version:
    major, minor, *_ = version.split(".")
    return int(major), int(minor)
