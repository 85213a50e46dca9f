"""Moves the content of journals into the manifest after captures ended or were killed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from capture.errors import DatasetError
from capture.storage.call_file import FileEntry
from capture.storage.capture_record import CaptureRecord
from capture.storage.dataset import Dataset
from capture.storage.journal import JournalContents, call_files, index_of, journals, stems
from capture.storage.locations import why_read_only
from capture.storage.locks import is_locked, locked
from capture.storage.names import JOURNAL, MANIFEST
from capture.text.counted import counted


class EndedCapture(NamedTuple):
    """Data of a capture from the process that made it, which overrides the journal."""

    stem: str
    """Start of the names of the capture's files."""
    capture: CaptureRecord
    replaces: bool
    """True if the capture should replace the manifest's capture of the same model."""
    completed: Collection[int] | None
    """Indices of calls whose files are complete; None to read them from the journal."""


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
    directory = Path(directory)
    if not directory.is_dir():
        raise DatasetError(f"{directory}: no such directory")
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
        raise DatasetError(
            f"cannot repair {_where(error, directory)}: {error.strerror or error}"
        ) from error
    return done


def _where(error: OSError, directory: Path) -> str:
    """Return the directory, and the file that could not be written if the error names a file."""
    named = error.filename
    return f"{directory}: {named}" if named and str(named) != str(directory) else str(directory)


def finish(
    directory: Path, *, ended: EndedCapture | None = None, certain: bool = False
) -> dict[str, str]:
    """Move the content of journals that no process writes any more into the manifest.

    The caller holds the directory's lock. If the process is killed during this function, the next
    call finishes the work. Files that the manifest lists are kept, unless a complete capture
    replaces their capture.

    Args:
        ended: capture whose journal this process has just closed.
        certain: True if the caller knows that no process writes to the directory, even on a file
            system without locks.

    Returns:
        A sentence for each capture that had not ended or was damaged, by the stem of its files.

    Raises:
        OSError: the directory cannot be written. The journals are kept.
    """
    done = _delete_empty_journals(directory, certain=certain)
    found = journals(directory)
    over = [
        journal
        for journal in found
        if journal.active is False
        or (journal.active is None and (certain or _is_of(journal, ended)))
    ]
    writing = {journal.stem for journal in found if journal not in over}
    dataset = Dataset.listed(directory, found)
    added: list[JournalContents] = []
    over_without_calls: list[JournalContents] = []
    for journalled in over:
        is_own = _is_of(journalled, ended)
        known: tuple[CaptureRecord | None, Collection[int] | None] = None, None
        # Data of this process overrides the journal of its capture, which may be damaged.
        if ended is not None and is_own:
            known, journalled.replaces = (ended.capture, ended.completed), ended.replaces
        try:
            listing = Dataset.from_journal(
                directory, journalled, over=True, record=known[0], completed=known[1]
            )
        except ValueError as error:
            done[journalled.stem] = f"left {journalled.path}, which is damaged ({error})"
            writing.add(journalled.stem)
            continue
        [capture] = listing.captures
        count, lost = len(listing.entries), listing.lacks(journalled)
        earlier = dataset.capture_of(capture.model)
        is_other = earlier is not None and not earlier.is_same(capture)
        # This journal contains nothing new: it was restored with an old copy of the directory.
        if earlier is not None and earlier.supersedes(capture):
            journalled.path.unlink(missing_ok=True)
            done[journalled.stem] = (
                f"deleted {journalled.path}, which is older than the complete capture of "
                f"{capture.model}"
            )
        elif not count:
            # The journal is deleted after the manifest is written, so that a kill loses nothing.
            over_without_calls.append(journalled)
            if not is_own:
                done[journalled.stem] = (
                    f"deleted {journalled.path}: a killed capture of {capture.model} had no "
                    "complete call" + (f"; {lost} had been only in memory" if lost else "")
                )
        # An incomplete capture must not replace an earlier capture.
        elif not capture.complete if journalled.replaces else is_other:
            done[journalled.stem] = _set_aside(listing, journalled, _listed(dataset))
        else:
            dataset.merge(listing)
            added.append(journalled)
        if count and not is_own and not capture.complete and journalled.stem not in done:
            done[journalled.stem] = (
                f"{capture.model}: listed {counted(count, 'call')} of a killed capture"
                + (f"; {lost} more had been only in memory" if lost else "")
            )
        if damage := _damage(listing, journalled, is_own=is_own):
            done[journalled.stem] = "; ".join(filter(None, (done.get(journalled.stem), damage)))
    if added:
        dataset.read_damaged()
        dataset.save_manifest()
    # Files are deleted last, when the manifest on the disk no longer lists them.
    listed = _listed(dataset)
    for journalled in over_without_calls:
        _delete_unlisted(journalled, listed)
    for journalled in added:
        if journalled.replaces:
            for stem in {*stems(directory, journalled.stem.partition("_")[0])} - writing:
                _delete_files(directory, stem, listed)
        _delete_unlisted(journalled, listed)
    return done


def _is_of(journalled: JournalContents, ended: EndedCapture | None) -> bool:
    return ended is not None and journalled.stem == ended.stem


def _damage(listing: Dataset, journalled: JournalContents, *, is_own: bool) -> str:
    """Return the damage of a journal; empty if it is intact, or if a kill explains the losses."""
    unlisted = sum(entry.checksum is None for entry in listing.entries)
    if not journalled.damaged and not (is_own and unlisted):
        return ""
    if not unlisted:
        lines = counted(journalled.damaged, "line")
        return f"{journalled.path} was damaged: {lines} of it cannot be read"
    return (
        f"{journalled.path} was damaged: {unlisted} of {counted(len(listing), 'call')} had to be "
        "read from the files, without their checksums"
    )


def _listed(dataset: Dataset) -> set[Path]:
    """Return the files that a manifest lists, including damaged entries."""
    return {file.path for files in (dataset.entries, dataset.damaged) for file in files}


def _delete_empty_journals(directory: Path, *, certain: bool) -> dict[str, str]:
    """Delete empty journals of killed processes; return a sentence for each, by stem."""
    done = {}
    for path in directory.glob(f"*{JOURNAL}"):
        held, stem = is_locked(path), path.name.removesuffix(JOURNAL)
        is_empty = path.is_file() and not path.stat().st_size
        had_none = not call_files(directory, stem)
        if is_empty and had_none and not held and (held is False or certain):
            path.unlink(missing_ok=True)
            done[stem] = f"deleted {path}: a capture was killed before its first call"
    return done


def _delete_unlisted(journalled: JournalContents, listed: set[Path]) -> None:
    """Delete a journal, and the files of its calls that were dropped or are incomplete."""
    for path in call_files(journalled.path.parent, journalled.stem):
        # A damaged journal may lack lines of complete calls, so readable files stay.
        is_given_up = not journalled.damaged or index_of(path) in journalled.dropped
        if path not in listed and (is_given_up or not _is_call(path)):
            path.unlink(missing_ok=True)
    journalled.path.unlink(missing_ok=True)


def _is_call(path: Path) -> bool:
    with contextlib.suppress(DatasetError):
        FileEntry.read(path)
        return True
    return False


def _delete_files(directory: Path, stem: str, listed: set[Path]) -> None:
    for path in call_files(directory, stem):
        if path not in listed:
            path.unlink(missing_ok=True)


def _set_aside(listing: Dataset, journalled: JournalContents, listed: set[Path]) -> str:
    """Move a capture to its own directory, because the manifest lists another of the same model."""
    directory, [capture] = listing.directory, listing.captures
    aside, number = directory / f"unfinished-{journalled.stem}", 1
    while os.path.lexists(aside / MANIFEST) or aside.is_symlink():
        number += 1
        aside = directory / f"unfinished-{journalled.stem}-{number}"
    aside.mkdir(exist_ok=True)  # an earlier repair that was killed may have created it
    own = [entry for entry in listing.entries if entry.path not in listed]
    for entry in own:
        with contextlib.suppress(FileNotFoundError):  # an earlier repair moved it
            entry.path.rename(aside / entry.path.name)
    moved = [replace(entry, path=aside / entry.path.name) for entry in own]
    moved = [entry for entry in moved if entry.path.exists()]
    there = {entry.path for entry in moved}
    for path in call_files(aside, journalled.stem):  # moved by an earlier repair that was killed
        if path not in there:
            with contextlib.suppress(DatasetError):
                moved.append(FileEntry.read(path))
    if moved:
        Dataset(aside, moved, listing.captures).save_manifest()
    else:  # an earlier repair moved everything and wrote the manifest
        aside.rmdir()
    _delete_unlisted(journalled, listed)
    return (
        f"{capture.model}: its earlier capture stays; {counted(len(moved), 'call')} of the new, "
        f"incomplete one went to {aside}"
    )
