"""Merges captures that only journals list, such as unfinished ones, into those of a manifest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from capture.storage.call_file import FileEntry
from capture.storage.capture_record import CaptureRecord
from capture.storage.journal import JournalContents
from capture.storage.unfinished import UnfinishedCapture
from capture.text.counted import counted
from capture.text.printable import quoted


class Merging:
    """Captures and files of a manifest, to which captures are added one by one.

    The time to add a capture depends only on its own calls and on the calls that it replaces.
    """

    def __init__(self, captures: Iterable[CaptureRecord], entries: Iterable[FileEntry]) -> None:
        self.records = {record.model: record for record in captures}
        """Record of each model's capture."""
        self._paths: set[Path] = set()
        self._entries: dict[str, list[FileEntry]] = {}
        self._list(entries)

    @property
    def captures(self) -> list[CaptureRecord]:
        return list(self.records.values())

    @property
    def entries(self) -> list[FileEntry]:
        """Entries of all files, model by model."""
        return [entry for entries in self._entries.values() for entry in entries]

    def add(self, capture: UnfinishedCapture) -> None:
        """Add a capture, and replace an earlier capture of the same model.

        Existing entries of the same capture are kept. An earlier capture is kept if the new one
        has no calls.
        """
        record = capture.record
        earlier = self.records.get(record.model)
        if earlier is not None and not capture.entries:
            return
        if earlier is not None and not earlier.is_same(record):
            self._paths.difference_update(e.path for e in self._entries.pop(record.model, []))
        self.records.pop(record.model, None)  # so that the new record is the last
        self.records[record.model] = record
        self._list(entry for entry in capture.entries if entry.path not in self._paths)

    def _list(self, entries: Iterable[FileEntry]) -> None:
        for entry in entries:
            self._entries.setdefault(entry.origin.model, []).append(entry)
            self._paths.add(entry.path)

    def add_unfinished(self, journal: JournalContents, files: Mapping[str, Sequence[Path]]) -> str:
        """Add the capture of a journal for reading, and return a note about it.

        Args:
            files: files of the directory (`call_files`).
        """
        repair = f"`capture repair {quoted(journal.path.parent)}`"
        try:
            capture = UnfinishedCapture.of(journal, files, over=journal.active is False)
        except ValueError as error:
            return f"{journal.path} is damaged ({error})"
        model, listed = capture.record.model, self.records.get(capture.record.model)
        if listed is not None and listed.supersedes(capture.record):
            return ""
        is_other = listed is not None and not listed.is_same(capture.record)
        # A capture that was killed before its first complete call has nothing to list.
        has_ended_empty = journal.active is False and not capture.entries
        if not journal.replaces and not is_other and not has_ended_empty:
            self.add(capture)
        if journal.active:
            return f"{model} is still being recorded"
        if journal.active is None:
            return (
                f"{model} is still being recorded or was killed (the file system has no locks that "
                f"would show it); if it was killed, finish it with {repair}"
            )
        complete = counted(len(capture.entries), "complete call")
        end = "ended, but is not in the manifest" if journal.ended else "was killed"
        state = f"the capture of {model} {end}: {complete}"
        if journal.lost:
            state += f", {journal.lost} more only in memory"
        if journal.damaged:
            state += f", and {counted(journal.damaged, 'line')} of its journal cannot be read"
        if journal.replaces:
            state += "; the earlier capture, which it was to replace, is read"
        elif is_other:
            state += "; the capture that the manifest lists is read"
        return f"{state}; finish it with {repair}"
