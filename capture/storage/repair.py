"""Moves the content of journals into the manifest after captures ended or were killed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from capture.errors import DatasetError
from capture.storage.call_file import FileEntry
from capture.storage.dataset import Dataset
from capture.storage.journal import JournalContents, call_files, index_of, journals, slug_of
from capture.storage.locations import directory_of, why_read_only
from capture.storage.locks import locked
from capture.storage.merging import Merging
from capture.storage.names import MANIFEST
from capture.storage.unfinished import UnfinishedCapture
from capture.text.counted import counted


def repair(directory: str | Path) -> list[str]:
    """Finish killed captures, and restore a missing or damaged manifest.

    Complete calls are listed, and incomplete files are deleted. A killed capture that should have
    replaced an earlier capture is moved to its own directory. On a file system without locks, make
    sure that no process records into the directory.

    Returns:
        A sentence for each change.

    Raises:
        DatasetError: the directory is missing, or cannot be written.
    """
    if reason := why_read_only(directory):
        raise DatasetError(f"{reason}: repair the directory that it was made from")
    directory_of(directory)  # reports a file, or a missing directory
    directory = Path(directory)
    try:
        with locked(directory):
            before = Dataset.listed(directory)
            done = list(finish(directory, certain=True).values())
            dataset = Dataset.listed(directory)
            again = dataset.read_damaged()
            if before.note or again:
                dataset.save_manifest()
                files = f"read {counted(again, 'file')} with a damaged entry" if again else ""
                why = "; ".join(filter(None, (before.note, files)))
                done.append(f"wrote {directory / MANIFEST} again: {why}")
    except OSError as error:
        raise DatasetError(f"cannot repair {directory}: {error}") from error
    return done


def finish(directory: Path, *, own: str = "", certain: bool = False) -> dict[str, str]:
    """Move the content of journals that no process writes any more into the manifest.

    The caller holds the directory's lock. If the process is killed during this function, the next
    call finishes the work. Files that the manifest lists are kept, unless a complete capture
    replaces their capture.

    Args:
        own: beginning of the file names of a capture that this process has just ended.
        certain: True if the caller knows that no process writes to the directory, even on a file
            system without locks.

    Returns:
        A sentence for each capture that had not ended or was damaged, keyed by how its file names
        begin.

    Raises:
        OSError: the directory cannot be written. The journals are kept.
    """
    done: dict[str, str] = {}
    found = journals(directory)
    over = [
        journal
        for journal in found
        if journal.active is False or (journal.active is None and (certain or journal.stem == own))
    ]
    writing = {journal.stem for journal in found} - {journal.stem for journal in over}
    files = call_files(directory) if over else {}
    dataset = Dataset.listed(directory)
    merging, listed = Merging(dataset.captures, dataset.entries), _listed(dataset)
    added: list[JournalContents] = []
    without_calls: list[JournalContents] = []
    for journal in over:
        if journal.is_empty:
            journal.path.unlink(missing_ok=True)
            done[journal.stem] = (
                f"deleted {journal.path}: a capture was killed before its first call"
            )
            continue
        try:
            capture = UnfinishedCapture.of(journal, files, over=True)
        except ValueError as error:
            done[journal.stem] = f"left {journal.path}, which is damaged ({error})"
            writing.add(journal.stem)
            continue
        record, calls = capture.record, counted(len(capture.entries), "call")
        earlier = merging.records.get(record.model)
        is_other = earlier is not None and not earlier.is_same(record)
        sentence = ""
        if earlier is not None and earlier.supersedes(record):
            # An old copy of the directory was restored over the new one.
            journal.path.unlink(missing_ok=True)
            sentence = (
                f"deleted {journal.path}, which is older than the complete capture of "
                f"{record.model}"
            )
        elif not capture.entries:
            # The journal is deleted after the manifest is written, so that a kill loses nothing.
            without_calls.append(journal)
            if journal.stem != own:
                sentence = (
                    f"deleted {journal.path}: a killed capture of {record.model} had no complete "
                    "call" + (f"; {journal.lost} had been only in memory" if journal.lost else "")
                )
        # An incomplete capture must not replace an earlier capture.
        elif not record.complete if journal.replaces else is_other:
            sentence = _set_aside(capture, journal, files, listed)
        else:
            merging.add(capture)
            listed.update(entry.path for entry in capture.entries)
            added.append(journal)
            if journal.stem != own and not record.complete:
                sentence = f"{record.model}: listed {calls} of a killed capture" + (
                    f"; {journal.lost} more had been only in memory" if journal.lost else ""
                )
        sentences = [sentence, _damage(capture, journal)]
        if any(sentences):
            done[journal.stem] = "; ".join(filter(None, sentences))
    if added:
        dataset.captures, dataset.entries = merging.captures, merging.entries
        dataset.read_damaged()
        dataset.save_manifest()
    # Files are deleted last, when the manifest on the disk no longer lists them.
    listed = _listed(dataset)
    replaced = {slug_of(journal.stem) for journal in added if journal.replaces}
    for stem, paths in files.items():
        if slug_of(stem) in replaced and stem not in writing:
            for path in paths:
                if path not in listed:
                    path.unlink(missing_ok=True)
    for journal in [*without_calls, *added]:
        _delete_unlisted(journal, files, listed)
    return done


def _damage(capture: UnfinishedCapture, journal: JournalContents) -> str:
    """Return the damage of a journal as a sentence; empty if it is intact."""
    if not journal.damaged:
        return ""
    unlisted = sum(entry.checksum is None for entry in capture.entries)
    lines = f"{journal.path} was damaged: {counted(journal.damaged, 'line')} cannot be read"
    if not unlisted:
        return lines
    calls = counted(len(capture.entries), "call")
    return f"{lines}, and {unlisted} of {calls} were read from the files, without their checksums"


def _listed(dataset: Dataset) -> set[Path]:
    """Return the files that a manifest lists, including damaged entries."""
    return {file.path for files in (dataset.entries, dataset.damaged) for file in files}


def _delete_unlisted(
    journal: JournalContents, files: Mapping[str, Sequence[Path]], listed: set[Path]
) -> None:
    """Delete a journal, and the files of its calls that were dropped or are incomplete."""
    for path in files.get(journal.stem, []):
        # A damaged journal may lack lines of complete calls, so readable files stay.
        if path in listed:
            continue
        if journal.damaged and index_of(path) not in journal.dropped:
            with contextlib.suppress(DatasetError):
                FileEntry.read(path)
                continue
        path.unlink(missing_ok=True)
    journal.path.unlink(missing_ok=True)


def _set_aside(
    capture: UnfinishedCapture,
    journal: JournalContents,
    files: Mapping[str, Sequence[Path]],
    listed: set[Path],
) -> str:
    """Move a capture to its own directory, because the manifest lists another of the same model."""
    directory = journal.path.parent
    aside, number = directory / f"unfinished-{journal.stem}", 1
    while os.path.lexists(aside / MANIFEST) or aside.is_symlink():
        number += 1
        aside = directory / f"unfinished-{journal.stem}-{number}"
    moved = []
    for entry in capture.entries:
        if entry.path not in listed:
            aside.mkdir(exist_ok=True)  # an earlier repair that was killed may have created it
            moved.append(replace(entry, path=entry.path.rename(aside / entry.path.name)))
    there = {entry.path for entry in moved}
    # An earlier repair may have been killed after it had moved some files.
    earlier = (path for path in call_files(aside).get(journal.stem, []) if path not in there)
    moved += map(FileEntry.read, earlier)
    if moved:
        moved.sort(key=lambda entry: entry.origin.call_index)
        Dataset(aside, moved, [capture.record]).save_manifest()
    _delete_unlisted(journal, files, listed)
    calls = counted(len(moved), "call")
    return (
        f"{capture.record.model}: the earlier capture is kept; {calls} of the new, incomplete "
        f"capture went to {aside}"
    )
