"""Writes and reads the journal of a capture in progress, an append-only file.

    cogvideo.journal        one JSON object per line, followed by a tab and its CRC-32:
        {"capture": {…}, "replaces": false}     the first line
        {"sampled": 12, "dropped": [3]}         call 12 was chosen, and is in memory; call 3 was
                                                dropped for it
        {"file": "cogvideo-000012.safetensors", "bytes": …, "checksum": …, "call": {…}}
                                                the call's file is complete
        {"dropped": [12]}                       a call was dropped, or could not be written
        {"finished": {…}}                       the capture's final record for the manifest

The line of a call's file is written when the file is complete and its checksum is known. When the
capture ends, the manifest is written from the journal, and the journal is deleted. A journal
without a lock belongs to a capture that was killed. Incomplete or damaged lines are skipped.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import threading
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from capture.errors import DatasetError
from capture.storage import plain_files
from capture.storage.json_data import parsed
from capture.storage.locks import LocksUnsupported, is_locked, unlock, wait_for_lock
from capture.storage.names import CALL_FILE, JOURNAL, LONGEST_JOURNAL


class Journal:
    """The journal that this process writes, locked against other processes."""

    def __init__(self, path: Path, descriptor: int, note: str) -> None:
        self.path = path
        self.note = note
        """Warning that the file system has no locks; usually empty."""
        self._descriptor = descriptor
        self._lock = threading.Lock()

    @property
    def stem(self) -> str:
        """Beginning of the names of this capture's files."""
        return self.path.name.removesuffix(JOURNAL)

    @classmethod
    def begin(cls, path: Path, capture: dict[str, Any], *, replaces: bool) -> Journal:
        """Create a journal.

        Raises:
            FileExistsError: a journal of that name exists.
            OSError: the journal cannot be created or written.
        """
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(path, flags, 0o666)
        note = ""
        try:
            try:
                wait_for_lock(descriptor, path)  # a reader of the directory may hold it briefly
            except LocksUnsupported as error:
                note = (
                    f"{path.parent} is on a file system without locks ({error.strerror}): "
                    "make sure that no other process records there"
                )
            journal = cls(path, descriptor, note)
            journal.append(capture=capture, replaces=replaces)
        except BaseException:
            path.unlink(missing_ok=True)
            os.close(descriptor)
            raise
        return journal

    def append(self, **line: Any) -> None:
        """Write a complete line, or nothing.

        Raises:
            OSError: the line cannot be written.
        """
        text = json.dumps(line).encode()
        with self._lock:
            size = os.fstat(self._descriptor).st_size
            rest = memoryview(b"%s\t%08x\n" % (text, zlib.crc32(text)))
            try:
                while rest:
                    rest = rest[os.write(self._descriptor, rest) :]
            except BaseException:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._descriptor, size)
                raise

    def sync(self) -> None:
        """Wait until the lines are on the disk."""
        os.fsync(self._descriptor)

    @property
    def is_in_place(self) -> bool:
        """False if the file was moved, replaced or deleted."""
        try:
            return os.path.samestat(os.fstat(self._descriptor), os.stat(self.path))
        except FileNotFoundError:
            return False

    def close(self) -> None:
        """Release the lock, and keep the file."""
        with self._lock:  # waits for a line that is being written
            if self._descriptor >= 0:
                unlock(self._descriptor)
                self.abandon()

    def abandon(self) -> None:
        """Close the file in a forked child process; the parent process keeps the lock."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            with contextlib.suppress(OSError):
                os.close(descriptor)


@dataclass
class JournalContents:
    """Content of a journal, without any checks."""

    path: Path
    active: bool | None = False
    """True if a process is still writing the journal; None on a file system without locks."""
    capture: dict[str, Any] | None = None
    """Record of the capture; None if the lines with the record cannot be read."""
    replaces: bool = False
    """True if the capture should replace the manifest's capture of the same model."""
    files: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Lines of the completed files, by the index of the call."""
    sampled: set[int] = field(default_factory=set)
    """Indices of calls that were chosen but have no complete file."""
    dropped: set[int] = field(default_factory=set)
    """Indices of calls that were dropped."""
    ended: bool = False
    """True if the journal contains the end of the capture, so that only the manifest is missing."""
    damaged: int = 0
    """Number of lines that cannot be read."""

    @property
    def stem(self) -> str:
        """Beginning of the names of this capture's files."""
        return self.path.name.removesuffix(JOURNAL)

    @property
    def is_empty(self) -> bool:
        """True if the process that created the journal has written no line."""
        return self.capture is None and not self.damaged

    @property
    def lost(self) -> int:
        """Number of calls lost because only memory held them; 0 if the journal is damaged."""
        return 0 if self.damaged else len(self.sampled)

    def add(self, line: dict[str, Any]) -> None:
        """Add the content of a line."""
        if "capture" in line:
            self.capture, self.replaces = dict(line["capture"]), bool(line["replaces"])
        elif "finished" in line:
            self.damaged += self.capture is None  # the first line is lost
            self.capture, self.ended = dict(line["finished"]), True
        elif "file" in line:
            index = int(line["call"]["origin"]["call_index"])
            path = self.path.with_name(str(line["file"]))
            if stem_of(path) != self.stem or index_of(path) != index:
                raise ValueError("the line names the file of another call")
            self.sampled.discard(index)
            self.files[index] = line
        else:
            chosen = [int(line["sampled"])] if "sampled" in line else []
            dropped = [int(index) for index in line.get("dropped", ())]
            if not chosen and not dropped:
                raise ValueError("the line is empty")
            for index in dropped:
                self.files.pop(index, None)
            self.dropped.update(dropped)
            self.sampled.difference_update(dropped)
            self.sampled.update(chosen)


def read(path: Path) -> JournalContents:
    """Read a journal."""
    found = JournalContents(path, is_locked(path))
    for line in io.BytesIO(plain_files.read(path, LONGEST_JOURNAL)):
        if not line.endswith(b"\n"):  # the line is being written, or its writer was killed
            break
        try:
            found.add(parsed(_verified(line)))
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
            found.damaged += 1
    return found


def _verified(line: bytes) -> bytes:
    """Check the checksum of a line, and return the line without it."""
    text, _, checksum = line.rstrip(b"\n").rpartition(b"\t")
    if int(checksum, 16) != zlib.crc32(text):
        raise ValueError("the line was altered")
    return text


def call_files(directory: Path) -> dict[str, list[Path]]:
    """Return the files of the captures' calls, complete or not, by the stem of the capture."""
    found: dict[str, list[Path]] = {}
    for path in sorted(directory.iterdir(), key=lambda each: each.name):
        if stem := stem_of(path):
            found.setdefault(stem, []).append(path)
    return found


def stem_of(path: Path) -> str:
    """Return the stem of the capture that a call's file belongs to; empty for other files."""
    match = CALL_FILE.fullmatch(path.name)
    return match[1] if match else ""


def index_of(path: Path) -> int:
    """Return the index of a file's call, from the file's name."""
    return int(path.stem.rpartition("-")[2])


def stems(directory: Path, slug: str) -> set[str]:
    """Return a model's stems in use: `SLUG`, and `SLUG_2` … for replacing captures."""
    names = (stem_of(path) or path.name.removesuffix(JOURNAL) for path in directory.iterdir())
    return {name for name in names if slug_of(name) == slug}


def slug_of(stem: str) -> str:
    """Return a stem without the number of a replacing capture."""
    return re.sub(r"_\d+$", "", stem)


def journals(directory: Path) -> list[JournalContents]:
    """Read the journals of a directory: of killed captures and of captures in progress."""
    found = []
    for path in sorted(directory.glob(f"*{JOURNAL}")):
        try:
            found.append(read(path))
        except DatasetError:  # deleted by another process, or not a file
            continue
    if any(journal.is_empty for journal in found):
        files = call_files(directory)
        for journal in found:
            if journal.is_empty and journal.stem in files:
                journal.damaged = 1  # the capture has files, so lines have been lost
    return found
