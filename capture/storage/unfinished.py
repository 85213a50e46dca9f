"""Reads a capture that has not ended: its journal, and the files of its calls."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from capture.errors import DatasetError
from capture.storage.call_file import FileEntry
from capture.storage.capture_record import CaptureRecord
from capture.storage.journal import JournalContents, index_of


@dataclass(frozen=True)
class UnfinishedCapture:
    """Capture that a journal describes, and its complete calls in their order."""

    record: CaptureRecord
    entries: list[FileEntry]

    @classmethod
    def of(
        cls, journal: JournalContents, files: Mapping[str, Sequence[Path]], *, over: bool
    ) -> UnfinishedCapture:
        """Read the capture of a journal, and count the journal's unreadable lines.

        Args:
            files: files of the directory (`call_files`).
            over: True if no process writes the capture any more. Only then are files read that have
                no line in a damaged journal.

        Raises:
            ValueError: no line or file describes the capture.
        """
        record = None
        if journal.capture is not None:
            try:
                record = CaptureRecord.from_json(journal.capture)
            except ValueError:
                journal.damaged += 1
        entries: dict[Path, FileEntry] = {}
        for line in journal.files.values():
            try:
                entry = FileEntry.from_json(journal.path.parent, line)
            except ValueError:
                journal.damaged += 1
                continue
            if not over or os.path.lexists(entry.path):
                entries[entry.path] = entry
                record = record or CaptureRecord.of(entry.origin)
        # The lines of these files may be lost.
        for path in files.get(journal.stem, []) if over else []:
            if journal.damaged and path not in entries and index_of(path) not in journal.dropped:
                with contextlib.suppress(DatasetError):
                    entry = FileEntry.read(path)
                    record = record or CaptureRecord.of(entry.origin)
                    found = entry.origin.model, entry.origin.call_index
                    if found == (record.model, index_of(path)):
                        entries[path] = entry
        if record is None:
            raise ValueError("no line describes the capture")
        ordered = sorted(entries.values(), key=lambda entry: entry.origin.call_index)
        return cls(record, ordered)
