"""Names of the files of a dataset."""

from __future__ import annotations

import re

MANIFEST = "manifest.json"
LONGEST_MANIFEST = 256 << 20
"""Maximum size of a manifest in bytes; each stored call takes about 3,000 bytes of it."""

JOURNAL = ".journal"
"""Extension of the journal of a capture in progress."""
LONGEST_JOURNAL = 1 << 30
"""Maximum size of a journal in bytes. The journal of 500,000 calls is smaller."""

CALL = ".safetensors"
CALL_FILE = re.compile(r"(.+)-\d+\.safetensors", re.DOTALL)
"""Pattern of the name of a call's file: the stem of its capture, and the call's index."""

FILE = re.compile(r"[^./\\\0][^/\\\0]{0,250}", re.DOTALL)
"""Pattern of a visible file name without a directory. Hidden files are unfinished."""


def is_of_dataset(name: str) -> bool:
    """Return whether a file with this name, without a directory, can belong to a dataset."""
    known = name == MANIFEST or name.endswith((JOURNAL, CALL))
    return known and FILE.fullmatch(name) is not None
