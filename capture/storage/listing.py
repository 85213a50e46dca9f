"""Lists the names of recorded calls without opening the dataset. Does not import torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from capture.errors import DatasetError
from capture.storage import plain_files
from capture.storage.json_data import parsed, required
from capture.storage.names import JOURNAL, LONGEST_MANIFEST, MANIFEST


def listed_files(directory: Path) -> list[str] | None:
    """Return the names of the files in a manifest, in its order, without checking that they exist.

    The result is None if the manifest is missing or damaged, or if there are journals, which may
    list more files.
    """
    if any(directory.glob(f"*{JOURNAL}")):
        return None
    try:
        data = parsed(plain_files.read(directory / MANIFEST, LONGEST_MANIFEST))
        items = required(data, "files", list[Any])
        return [required(item, "file", str) for item in items]
    except (DatasetError, ValueError):
        return None
