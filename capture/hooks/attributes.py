"""Reads attributes of models, whose own `__getattr__` may raise any error."""

from __future__ import annotations

from typing import Any


def attribute(owner: object, name: str, default: Any = None) -> Any:
    """Return an attribute; return `default` if it is missing or cannot be read."""
    try:
        return getattr(owner, name, default)
    except Exception:
        return default
