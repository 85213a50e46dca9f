"""The names of recorded calls, for those who do not want to open the dataset. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from capture.errors import DatasetError
from capture.storage import plain_files
from capture.storage.json_data import parsed, required
from capture.storage.names import JOURNAL, LONGEST_MANIFEST, MANIFEST


def listed_files(directory: Path) -> list[str] | None:
    """The files of calls that a manifest lists, whether there or not, in its order.

    None where that says too little: there is no manifest, it is damaged or another version's, or
    captures have not ended, whose journals list more.
    """
    if any(directory.glob(f"*{JOURNAL}")):
        return None
    try:
        data = parsed(plain_files.read(directory / MANIFEST, LONGEST_MANIFEST))
        items = required(data, "files", list[Any])
        return [required(item, "file", str) for item in items]
    except (DatasetError, ValueError):
        return None
