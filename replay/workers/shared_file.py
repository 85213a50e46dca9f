"""The file through which processes pass tensors, opened before any of them starts."""

from __future__ import annotations

import fcntl
import os
import tempfile
import weakref


class SharedFile:
    """Empty file without a name, in memory if the system supports this.

    Processes inherit its descriptor, because they cannot open each other's files. The file
    disappears with the last process that has it open, even after a crash.
    """

    def __init__(self) -> None:
        if hasattr(os, "memfd_create"):
            flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
            self.descriptor = os.memfd_create("attention-replay", flags)
            # If a worker could shrink the file, the system would end all readers of lost pages.
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, seals)
        else:
            self.descriptor, path = tempfile.mkstemp(prefix="attention-replay-")
            os.unlink(path)
        weakref.finalize(self, os.close, self.descriptor)
