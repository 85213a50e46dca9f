"""Base class of every error that users are meant to read."""

from __future__ import annotations


class Error(Exception):
    """An error that the user can remedy; its text is one sentence that says how."""
