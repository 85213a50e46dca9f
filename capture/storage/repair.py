"""Puts what journals say into the manifest: when a capture ends, or after it was killed."""

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
    """What the process that made a capture knows of it at its end, whatever its journal says."""

    stem: str
    """How the names of its files begin."""
    capture: CaptureRecord
    replaces: bool
    """It is to replace the manifest's capture of the same model."""
    completed: Collection[int] | None
    """The calls whose files are complete; None for those that the journal lists."""


def repair(directory: str | Path) -> list[str]:
    """Finish what killed captures left, and restore a missing or damaged manifest.

    Complete calls are listed, incomplete files deleted. A capture that was to replace an earlier
    one of the same model is moved to a directory of its own beside the files. On a file system
    without locks, make sure that nobody records into the directory.

    Returns:
        What was done, a sentence each.

    Raises:
        DatasetError: there is no such directory, or it cannot be written.
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
                files = f"{counted(again, 'file')} read whose entry was damaged" if again else ""
                why = "; ".join(filter(None, (before.note, files)))
                done.append(f"wrote {directory / MANIFEST} anew: {why}")
    except OSError as error:
        raise DatasetError(
            f"cannot repair {_where(error, directory)}: {error.strerror or error}"
        ) from error
    return done


def _where(error: OSError, directory: Path) -> str:
    """The directory, and which of its files could not be written, if that is another path."""
    named = error.filename
    return f"{directory}: {named}" if named and str(named) != str(directory) else str(directory)


def finish(
    directory: Path,
    *,
    ended: EndedCapture | None = None,
    certain: bool = False,
) -> dict[str, str]:
    """Move what journals say that nobody writes any more into the manifest.

    The caller holds the directory's lock. Killed at any moment, the next call does the rest. No
    file that the manifest lists is deleted, but those of a capture that a complete one replaces.

    Args:
        ended: a capture whose journal this process has just closed.
        certain: on a file system without locks, nobody writes to the directory.

    Returns:
        What was done for captures that had not ended, and what was wrong: a sentence for each file
        name's stem.

    Raises:
        OSError: the directory cannot be written; then the journals stay.
    """
    done = _delete_empty_journals(directory, certain=certain)
    found = journals(directory)
    over = [
        each
        for each in found
        if each.active is False or (each.active is None and (certain or _is_of(each, ended)))
    ]
    writing = {each.stem for each in found if each not in over}
    dataset = Dataset.listed(directory, found)
    added: list[JournalContents] = []
    over_without_calls: list[JournalContents] = []
    for journalled in over:
        is_own = _is_of(journalled, ended)
        known = (ended.capture, ended.completed) if ended is not None and is_own else (None, None)
        if ended is not None and is_own:
            journalled.replaces = ended.replaces
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
        if earlier is not None and earlier.supersedes(capture):
            journalled.path.unlink(missing_ok=True)
            done[journalled.stem] = (
                f"deleted {journalled.path}: {capture.model} is complete, and this is from an "
                "earlier copy"
            )
        elif not count:
            over_without_calls.append(journalled)
            if not is_own:
                done[journalled.stem] = (
                    f"deleted {journalled.path}: a killed capture of {capture.model} had no "
                    "complete call" + (f"; {lost} had been only in memory" if lost else "")
                )
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
    """What is said of a journal that does not list all there is, unless a kill explains that."""
    unlisted = sum(entry.checksum is None for entry in listing.entries)
    if not journalled.damaged and not (is_own and unlisted):
        return ""
    if not unlisted:
        lines = counted(journalled.damaged, "line")
        return f"{journalled.path} was damaged: {lines} of it cannot be read"
    return (
        f"{journalled.path} was damaged: {unlisted} of {counted(len(listing), 'call')} had to be "
        "read from the files, without the checksums that it had"
    )


def _listed(dataset: Dataset) -> set[Path]:
    """The files that a manifest lists, also where it does not say enough of them."""
    return {*(each.path for each in dataset.entries), *(each.path for each in dataset.damaged)}


def _delete_empty_journals(directory: Path, *, certain: bool) -> dict[str, str]:
    """Delete those of processes that were killed before they wrote a line, and say so, by stem."""
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
    """Delete a journal and the files of its calls that were dropped, or never complete."""
    for path in call_files(journalled.path.parent, journalled.stem):
        # A damaged journal may be wrong about what is no call of its capture.
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
    """Move a capture beside which the manifest lists another of the same model to a directory."""
    directory, [capture] = listing.directory, listing.captures
    aside, number = directory / f"unfinished-{journalled.stem}", 1
    while os.path.lexists(aside / MANIFEST) or aside.is_symlink():
        number += 1
        aside = directory / f"unfinished-{journalled.stem}-{number}"
    aside.mkdir(exist_ok=True)  # it exists if this was killed before
    own = [entry for entry in listing.entries if entry.path not in listed]
    for entry in own:
        with contextlib.suppress(FileNotFoundError):  # moved before
            entry.path.rename(aside / entry.path.name)
    moved = [replace(entry, path=aside / entry.path.name) for entry in own]
    moved = [entry for entry in moved if entry.path.exists()]
    there = {entry.path for entry in moved}
    for path in call_files(aside, journalled.stem):  # of one that was killed before
        if path not in there:
            with contextlib.suppress(DatasetError):
                moved.append(FileEntry.read(path))
    if moved:
        Dataset(aside, moved, listing.captures).save_manifest()
    else:  # the manifest, too, was written before
        aside.rmdir()
    _delete_unlisted(journalled, listed)
    return (
        f"{capture.model}: its earlier capture stays; of the new one, which is not complete, "
        f"{counted(len(moved), 'call')} went to {aside}"
    )
