"""Puts what journals say into the manifest: when a capture ends, or after it was killed."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path

from capture.dataset import MANIFEST, Dataset
from capture.errors import DatasetError
from capture.journal import Journalled, call_files, journals, stems
from capture.locks import locked


def repair(directory: str | Path) -> list[str]:
    """Finish what killed captures left, and restore a missing or damaged manifest.

    Complete calls are listed, incomplete files deleted. A capture that was to replace an earlier
    one of the same model is moved to a directory of its own beside the files.

    Returns:
        What was done, a sentence each.

    Raises:
        DatasetError: there is no such directory, or it cannot be written.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise DatasetError(f"{directory}: no such directory")
    try:
        with locked(directory):
            before = Dataset.listed(directory)
            done = list(finish(directory).values())
            if before.note:
                dataset = Dataset.listed(directory)
                dataset.save_manifest()
                done.append(f"wrote {directory / MANIFEST} anew: {before.note}")
    except OSError as error:
        raise DatasetError(f"cannot repair {directory}: {error}") from error
    return done


def finish(directory: Path) -> dict[str, str]:
    """Move what journals say that nobody writes any more into the manifest.

    The caller holds the directory's lock. Killed at any moment, the next call does the rest.

    Returns:
        What was done for captures that had not ended: a sentence for each file name's stem.

    Raises:
        OSError: the directory cannot be written; then the journals stay.
    """
    found = journals(directory)
    writing = {each.stem for each in found if each.active}
    dataset = Dataset.listed(directory)
    done: dict[str, str] = {}
    added: list[Journalled] = []
    for journalled in found:
        if journalled.active:
            continue
        listing = Dataset(directory, [], [])
        try:
            capture = listing.add(journalled)
        except ValueError as error:
            done[journalled.stem] = f"left {journalled.path}, which is damaged ({error})"
            continue
        count, lost = len(listing.entries), journalled.in_memory
        if not count:
            _discard(journalled)
            if lost:
                done[journalled.stem] = (
                    f"{capture.model}: a killed capture had no complete call; {lost} had been only "
                    "in memory"
                )
        elif journalled.replaces and not capture.complete:
            done[journalled.stem] = _set_aside(listing, journalled)
        else:
            dataset.add(journalled)
            added.append(journalled)
        if count and not capture.complete and journalled.stem not in done:
            done[journalled.stem] = f"{capture.model}: listed {count} calls of a killed capture" + (
                f"; {lost} more had been only in memory" if lost else ""
            )
    if added:
        dataset.save_manifest()
    kept = {entry.path for entry in dataset.entries}
    for journalled in added:
        for stem in {*stems(directory, journalled.stem.partition("_")[0])} - writing:
            for path in call_files(directory, stem):
                if path not in kept:
                    path.unlink(missing_ok=True)
        journalled.path.unlink(missing_ok=True)
    return done


def _discard(journalled: Journalled) -> None:
    """Delete a capture without a complete call."""
    for path in call_files(journalled.path.parent, journalled.stem):
        path.unlink(missing_ok=True)
    journalled.path.unlink(missing_ok=True)


def _set_aside(listing: Dataset, journalled: Journalled) -> str:
    """Move a capture that did not end, and that was to replace another, to a directory."""
    directory, [capture] = listing.directory, listing.captures
    aside = directory / f"unfinished-{journalled.stem}"
    number = 1
    while aside.exists():
        number += 1
        aside = directory / f"unfinished-{journalled.stem}-{number}"
    aside.mkdir()
    moved = []
    for entry in listing.entries:
        with contextlib.suppress(FileNotFoundError):  # moved before, when this was killed
            moved.append(replace(entry, path=entry.path.rename(aside / entry.path.name)))
    Dataset(aside, moved, listing.captures).save_manifest()
    journalled.path.unlink()
    return (
        f"{capture.model}: its earlier capture stays; the {len(moved)} calls of the new one, which "
        f"did not end, are in {aside}"
    )
