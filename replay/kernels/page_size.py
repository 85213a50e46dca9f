"""The size of a page, an option of every kernel that reads a paged cache."""

from __future__ import annotations

DEFAULT_PAGE_SIZE = 16
"""Keys in a page; the usual size of serving engines."""


def check_page_size(page_size: int) -> None:
    """Raise ValueError where pages hold nothing."""
    if page_size < 1:
        raise ValueError(f"a page holds at least one key, not {page_size}")
