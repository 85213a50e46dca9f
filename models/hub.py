"""Reads checkpoints from a directory or the Hugging Face hub, and explains failures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from huggingface_hub import HfApi, try_to_load_from_cache

from .errors import ModelError

Loaded = TypeVar("Loaded")

_REMEDIES = (
    "use --checkpoint DIR for a local copy, --size tiny for the small built-in model, "
    "or --weights random for the official shapes without a download"
)
_PROBE_SECONDS = 5.0


def read_checkpoint(load: Callable[..., Loaded], source: str, **options: Any) -> Loaded:
    """Call ``load(source, local_files_only=…, **options)`` and explain its errors.

    Args:
        load: A library's ``from_pretrained``.
        source: A directory or a hub id.
    """
    if Path(source).is_dir():
        try:
            return load(source, local_files_only=True, **options)
        # Every library raises its own errors for a broken checkpoint.
        except Exception as error:
            raise ModelError(
                f"{source} does not contain what this model needs ({_first_line(error)}): "
                "give a directory written by save_pretrained"
            ) from error
    unreachable = _why_unreachable(source)
    try:
        return load(source, local_files_only=unreachable is not None, **options)
    # OSError, ValueError, or an error of whichever HTTP library the hub client uses.
    except Exception as error:
        reason = unreachable or error
        raise ModelError(
            f"could not load {source} from the Hugging Face hub ({_first_line(reason)}): "
            f"{_REMEDIES}"
        ) from error


def refuse_missing(source: str, keys: Sequence[str]) -> None:
    """Raise if weights are missing, because the libraries only warn and use random weights."""
    if keys:
        raise ModelError(
            f"{source} lacks {len(keys)} of the model's weights (first {min(keys)}): give the "
            "complete checkpoint of this model, or use --weights random"
        )


def _why_unreachable(source: str) -> Exception | None:
    """Return the hub's error if the hub is unreachable but ``source`` is cached; else None.

    The hub is queried once, because the libraries would retry each file for half a minute.
    """
    try:
        HfApi().model_info(source, timeout=_PROBE_SECONDS)
    except Exception as error:
        cached = ("model_index.json", "config.json")
        try:
            if any(isinstance(try_to_load_from_cache(source, name), str) for name in cached):
                return error
        except ValueError:  # not a valid hub id
            raise ModelError(
                f"{source} is neither a directory nor a hub id: {_REMEDIES}"
            ) from error
        raise ModelError(
            f"could not load {source} from the Hugging Face hub ({_first_line(error)}): {_REMEDIES}"
        ) from error
    return None


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__).rstrip(".:")
