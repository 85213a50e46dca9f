"""Names of the files of a dataset."""

from __future__ import annotations

import re

MANIFEST = "manifest.json"
LONGEST_MANIFEST = 256 << 20
"""Limit of a manifest that is read, in bytes. A stored call takes about 3,000."""

JOURNAL = ".journal"
"""Ending of the journal's name of a capture in progress."""
LONGEST_JOURNAL = 1 << 30
"""Limit of a journal that is read, in bytes. A capture of 500,000 calls writes less."""

CALL = ".safetensors"

FILE = re.compile(r"[^./\\\0][^/\\\0]{0,250}", re.DOTALL)
"""Pattern of a name in the directory itself. Hidden names belong to unfinished files."""


def is_of_dataset(name: str) -> bool:
    """Return whether a file of that name, without a directory, can belong to a dataset."""
    known = name == MANIFEST or name.endswith((JOURNAL, CALL))
    return known and FILE.fullmatch(name) is not None
