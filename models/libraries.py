"""diffusers and transformers as installed here: which versions, and what changed between them."""

from __future__ import annotations

import importlib.metadata
from typing import Literal

from .runnable import ModelError

Library = Literal["diffusers", "transformers"]

NEEDED: dict[str, dict[Library, tuple[int, int]]] = {
    "cogvideo": {"transformers": (5, 0), "diffusers": (0, 36)},
    "flux": {"transformers": (5, 0), "diffusers": (0, 36)},
    "llama": {"transformers": (5, 0)},
}
"""The oldest versions that build the models we name, by the file that builds them. transformers 5
reads the tokenizers that come with this package, and diffusers 0.36 is the first that imports
beside transformers 5; both found by trying."""

DTYPE_SINCE: dict[Library, tuple[int, int]] = {"diffusers": (0, 40), "transformers": (4, 56)}
"""Since when `from_pretrained` takes `dtype`; it took `torch_dtype` before."""


def dtype_keyword(library: Library) -> str:
    """What the library's `from_pretrained` calls the dtype of the weights."""
    installed = _numbers(importlib.metadata.version(library))
    return "dtype" if installed >= DTYPE_SINCE[library] else "torch_dtype"


def check(model: str, builder: str) -> None:
    """Refuse libraries that are missing, or too old for `model`, which the file `builder` builds.

    Raises:
        ModelError: with the library, the version that is needed and the one that is installed.
    """
    for library, oldest in NEEDED[builder].items():
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


def _numbers(version: str) -> tuple[int, int]:
    major, minor, *_ = version.split(".")
    return int(major), int(minor)
