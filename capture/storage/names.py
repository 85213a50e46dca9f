"""The files of a dataset, by their names."""

from __future__ import annotations

import re

MANIFEST = "manifest.json"
LONGEST_MANIFEST = 256 << 20
"""Bytes. A stored call takes some 3,000."""

JOURNAL = ".journal"
"""Ends the name of what a capture in progress has written."""
LONGEST_JOURNAL = 1 << 30
"""Bytes of a journal that is read. A capture of 500,000 calls writes less."""

CALL = ".safetensors"

FILE = re.compile(r"[^./\\\0][^/\\\0]{0,250}", re.DOTALL)
"""A name in the directory itself, and no hidden one: those are unfinished files."""


def is_of_dataset(name: str) -> bool:
    """Whether a file of that name, without a directory, can be of a dataset."""
    known = name == MANIFEST or name.endswith((JOURNAL, CALL))
    return known and FILE.fullmatch(name) is not None
