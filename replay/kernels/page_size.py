"""Page size, an option of every kernel that reads a paged cache."""

from __future__ import annotations

DEFAULT_PAGE_SIZE = 16
"""Default number of keys in a page, as in most serving engines."""


def check_page_size(page_size: int) -> None:
    """Raise ValueError if the page size is below 1."""
    if page_size < 1:
        raise ValueError(f"invalid page size {page_size} (must be at least 1)")
