"""Base class of every error that is shown to users."""

from __future__ import annotations


class Error(Exception):
    """An error that the user can fix; the message is one sentence with the remedy."""
