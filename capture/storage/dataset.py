"""Reads and writes datasets: directories of safetensors files with a JSON manifest.

    captured_inputs/
        manifest.json                    captures with their censuses, files with their checksums
        cogvideo-000012.safetensors      one self-contained call per file
        llama.journal                    a capture in progress (`capture.storage.journal`)

A call's file contains its tensors. All other data of the call (`CallHeader`) is JSON under the key
`attention-replay` of the safetensors header. Values are stored in memory order, without the
repetitions of expanded dimensions; the strides are in the header. A file's header is written last,
and the manifest gets its name when it is complete. Nothing is pickled. If a directory has neither
manifest nor journal, the headers of its files are read instead.

A dataset may come from an untrusted source. Everything is checked before it is used, and every
fault raises a `DatasetError` (SECURITY.md).
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, overload

from capture.call.attention_call import AttentionCall
from capture.errors import DatasetError
from capture.storage import plain_files
from capture.storage.cached_copy import CachedCopy, ProgressReport, no_report
from capture.storage.call_file import FORMAT, FileEntry, file_path
from capture.storage.capture_record import CaptureRecord
from capture.storage.joined_calls import JoinedCalls
from capture.storage.journal import JournalContents, call_files, index_of, is_call_file, journals
from capture.storage.json_data import parsed, required, shown
from capture.storage.locations import cached_copy_of
from capture.storage.names import LONGEST_MANIFEST, MANIFEST
from capture.storage.notebook import dataset_html
from capture.text.counted import counted
from capture.text.printable import quoted

_MOST_CAPTURES = 10_000
_MOST_DAMAGED = 1_000
"""Maximum number of damaged entries in a manifest. Above it, the files are read instead."""


@dataclass(frozen=True)
class DamagedFile:
    """A file that is not a readable call."""

    path: Path
    error: DatasetError
    """Reason as an exception without a traceback, so that it keeps no frame alive."""


class Dataset(Sequence[AttentionCall]):
    """Recorded calls of a directory, model by model, in the order of the calls.

    Indexing and iterating load tensors to the CPU; `entries` has all other data.
    """

    def __init__(
        self,
        directory: Path,
        entries: list[FileEntry],
        captures: list[CaptureRecord],
        note: str = "",
        damaged: Sequence[DamagedFile] = (),
    ) -> None:
        self.directory = directory
        self.cached_copy: CachedCopy | None = None
        """Copy in the cache, if `directory` belongs to one; None for a directory of the user."""
        self.entries = entries
        self.captures = captures
        self.note = note
        """Warning about how the directory was read; usually empty."""
        self.damaged = damaged
        """Files that are listed as calls but cannot be read."""
        self.checks = True
        """True if indexing and iterating compare checksums."""

    @classmethod
    def open(
        cls, where: str | Path, *, check: bool = True, report: ProgressReport = no_report
    ) -> Dataset:
        """Read the manifest of a dataset, or the headers of its files if it has no manifest.

        Args:
            where: a directory, an archive of a directory, or an address (see `load`).
            check: compare the checksum of every file that is loaded by indexing or iterating.
            report: function that receives the progress of copies to the cache.

        Raises:
            DatasetError: the dataset is missing, cannot be reached, contains no recorded calls, or
                its manifest has another format.
        """
        cached_copy = cached_copy_of(where, report)
        directory = Path(where) if cached_copy is None else cached_copy.directory
        # Journals are read before the manifest. If a capture ends in between, the manifest lists
        # it, because its journal is deleted only after the manifest is written.
        unfinished = journals(directory) if directory.is_dir() else []
        dataset = cls.listed(directory)
        dataset.cached_copy = cached_copy
        dataset._add_journals(unfinished)
        dataset.checks = check
        if cached_copy is not None:
            dataset.entries = [replace(entry, cached_copy=cached_copy) for entry in dataset.entries]
            dataset._name_as_given(cached_copy.address)
        if not dataset.entries:
            reasons = [str(each.error) for each in dataset.damaged[:3]]
            why = "; ".join([dataset.note, *reasons] if dataset.note else reasons)
            remedy = f"; record some with `capture --model NAME --out {quoted(directory)}`"
            raise DatasetError(
                f"{dataset.address}: holds no recorded calls{why and f' ({why})'}"
                f"{remedy if cached_copy is None else ''}"
            )
        return dataset

    @classmethod
    def open_or_new(cls, directory: Path) -> Dataset:
        """Open a directory for writing; the directory may have no recorded calls."""
        unfinished = journals(directory) if directory.is_dir() else []
        dataset = cls.listed(directory)
        dataset._add_journals(unfinished)
        return dataset

    @classmethod
    def listed(
        cls, directory: Path, unfinished: Sequence[JournalContents] | None = None
    ) -> Dataset:
        """Read only the manifest, without the journals of captures that have not ended.

        Args:
            unfinished: journals that have already been read; None to read them when needed.
        """
        manifest = directory / MANIFEST
        if not os.path.lexists(manifest):
            return cls._rebuilt(directory, f"{manifest} is missing", unfinished)
        try:
            captures, items = _read_manifest(manifest)
            entries, damaged = _checked(manifest, items)
        except ValueError as error:
            return cls._rebuilt(directory, f"{manifest} is damaged ({error})", unfinished)
        unchecked = sum(entry.checksum is None for entry in entries.values())
        note = unchecked and (
            f"{manifest} lacks the checksums of {unchecked} of its files, so that changes to them "
            "would go unnoticed"
        )
        captures += _missing_records(captures, entries.values())
        return cls(directory, list(entries.values()), captures, note or "", damaged)

    @classmethod
    def from_journal(
        cls,
        directory: Path,
        journalled: JournalContents,
        *,
        over: bool,
        record: CaptureRecord | None = None,
        completed: Collection[int] | None = None,
    ) -> Dataset:
        """Return a dataset with the capture that a journal describes.

        Args:
            over: True if no process writes the capture any more. In this case, files without a
                line in the journal may also be complete.
            record: record of the capture; None to read it from the journal.
            completed: indices of the complete calls; None to read them from the journal.
        """
        if record is None and journalled.capture is not None:
            try:
                record = CaptureRecord.from_json(journalled.capture)
            except ValueError:
                journalled.damaged += 1
        entries: dict[Path, FileEntry] = {}
        for item in journalled.files.values():
            try:
                entry = FileEntry.from_json(directory, item)
                if over and not os.path.lexists(entry.path):
                    continue
                entries[entry.path] = entry
                record = record or _record_of(entry)
            except ValueError:
                journalled.damaged += 1
        for path in call_files(directory, journalled.stem) if over else []:
            if path not in entries and journalled.may_be_complete(path, completed):
                with contextlib.suppress(DatasetError):
                    entry = FileEntry.read(path)
                    # Without a readable line in the journal, the model's name comes from a file.
                    if record is None or (not entries and record.model != entry.origin.model):
                        record = _record_of(entry)
                    is_its_own = entry.origin.call_index == index_of(path)
                    if is_its_own and entry.origin.model == record.model:
                        entries[path] = entry
        if record is None:
            raise ValueError("no line describes the capture")
        ordered = sorted(entries.values(), key=lambda entry: entry.origin.call_index)
        if completed is not None:
            ordered = [entry for entry in ordered if entry.origin.call_index in completed]
        return cls(directory, ordered, [record])

    def merge(self, other: Dataset) -> None:
        """Add the capture of another dataset, and replace an earlier capture of the same model.

        Existing entries of the same capture are kept. An earlier capture is kept if the other
        dataset has no calls.
        """
        [capture] = other.captures
        earlier = self.capture_of(capture.model)
        if earlier is not None and not other.entries:
            return
        if earlier is not None and not earlier.is_same(capture):
            self.entries = [entry for entry in self.entries if entry.origin.model != capture.model]
        others = [record for record in self.captures if record.model != capture.model]
        self.captures = [*others, capture]
        listed = {entry.path for entry in self.entries}
        self.entries += [entry for entry in other.entries if entry.path not in listed]

    def lacks(self, journalled: JournalContents) -> int:
        """Return the number of calls that were never written; 0 if the journal is damaged."""
        there = {entry.origin.call_index for entry in self.entries}
        return 0 if journalled.damaged else len(journalled.sampled - there)

    def read_damaged(self) -> int:
        """Read the files whose entries are damaged; return the number of files that were read."""
        read = []
        for damaged in self.damaged:
            with contextlib.suppress(DatasetError):
                read.append(FileEntry.read(damaged.path))
        self.entries += read
        self.captures += _missing_records(self.captures, read)
        paths = {entry.path for entry in read}
        self.damaged = [damaged for damaged in self.damaged if damaged.path not in paths]
        return len(read)

    def capture_of(self, model: str) -> CaptureRecord | None:
        """Return the record of a model's capture."""
        return next((record for record in self.captures if record.model == model), None)

    @property
    def address(self) -> str:
        """Location of the dataset, as the user gave it."""
        return str(self.directory) if self.cached_copy is None else self.cached_copy.address

    def fetch(
        self, entries: Sequence[FileEntry] | None = None, report: ProgressReport = no_report
    ) -> list[DamagedFile]:
        """Copy files (default: all) to the cache before they are loaded.

        Returns:
            Files that cannot be copied.

        Raises:
            DatasetError: the disk has no room for the files, or the dataset cannot be reached.
        """
        if self.cached_copy is None:
            return []
        wanted = [entry.wanted for entry in (self.entries if entries is None else entries)]
        errors = self.cached_copy.fetch_all(wanted, report)
        return [DamagedFile(path, error) for path, error in errors.items()]

    def _add_journals(self, unfinished: Iterable[JournalContents]) -> None:
        for journalled in unfinished:
            self._add_unfinished(journalled)

    def _name_as_given(self, address: str) -> None:
        """Replace the path of the copy in notes and errors with the dataset's address."""
        self.note = self.note.replace(str(self.directory), address)
        self.damaged = [
            DamagedFile(each.path, DatasetError(each.error.reason, f"{address}/{each.path.name}"))
            for each in self.damaged
        ]

    def _add_unfinished(self, journalled: JournalContents) -> None:
        try:
            over = journalled.active is False and self.cached_copy is None
            found = Dataset.from_journal(self.directory, journalled, over=over)
            [capture] = found.captures
            model, listed = capture.model, self.capture_of(capture.model)
            if listed is not None and listed.supersedes(capture):
                return
            is_other = listed is not None and not listed.is_same(capture)
            # A capture that was killed before its first complete call has nothing to list.
            has_ended_empty = journalled.active is False and not found.entries
            if not journalled.replaces and not is_other and not has_ended_empty:
                self.merge(found)
        except ValueError as error:
            self._add_note(f"{journalled.path} is damaged ({error})")
            return
        if self.cached_copy is not None:
            done = counted(len(found), "complete call")
            damage = ", and its journal is damaged" if journalled.damaged else ""
            self._add_note(f"the capture of {model} had not ended: {done}{damage}")
            return
        if journalled.active:
            self._add_note(f"{model} is still being recorded")
            return
        if journalled.active is None:
            self._add_note(
                f"{model} is still being recorded or was killed (the file system has no locks that "
                "would show it); if it was killed, finish it with "
                f"`capture repair {quoted(self.directory)}`"
            )
            return
        lost = found.lacks(journalled)
        end = "ended, but is not in the manifest" if journalled.ended else "was killed"
        state = f"the capture of {model} {end}: {counted(len(found), 'complete call')}" + (
            f", {lost} more only in memory" if lost else ""
        )
        if journalled.damaged:
            state += f", and {counted(journalled.damaged, 'line')} of its journal cannot be read"
        kept = "; the capture that the manifest lists is read" if is_other else ""
        if journalled.replaces:
            kept = "; the earlier capture, which it was to replace, is read"
        self._add_note(f"{state}{kept}; finish it with `capture repair {quoted(self.directory)}`")

    def _add_note(self, text: str) -> None:
        self.note = "; ".join(filter(None, (self.note, text)))

    @classmethod
    def _rebuilt(
        cls, directory: Path, why: str, unfinished: Sequence[JournalContents] | None
    ) -> Dataset:
        entries, damaged = [], []
        # Files are listed before journals are read, because captures may be writing files.
        paths = sorted(directory.glob("[!.]*.safetensors"))
        for journalled in journals(directory) if unfinished is None else unfinished:
            paths = [path for path in paths if not is_call_file(path, journalled.stem)]
        for path in paths:
            try:
                entries.append(FileEntry.read(path))
            except DatasetError as error:
                damaged.append(DamagedFile(path, DatasetError(error.reason, error.path)))
        entries.sort(key=lambda entry: (entry.origin.model, entry.origin.call_index))
        captures = _missing_records([], entries)
        note = why if os.path.lexists(directory / MANIFEST) else ""
        if entries:
            note = f"{why}: the files were read instead, without a census or checksums"
        return cls(directory, entries, captures, note, damaged)

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.entries)

    def save_manifest(self) -> None:
        """Add missing checksums, and write the manifest atomically to the disk."""
        self.entries = [entry.with_checksum() for entry in self.entries]
        temporary = self.directory / f".{MANIFEST}.tmp"
        try:
            with os.fdopen(plain_files.create(temporary), "w") as file:
                file.writelines(self._manifest())
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self.directory / MANIFEST)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        plain_files.sync(self.directory)

    def _manifest(self) -> Iterator[str]:
        """Yield the manifest, one capture or file per line (`indent=` takes ten times as long)."""
        yield f'{{"format": {json.dumps(FORMAT)},\n"captures": [\n'
        yield ",\n".join(json.dumps(capture.to_json()) for capture in self.captures)
        yield '\n],\n"files": [\n'
        yield ",\n".join(json.dumps(entry.to_json()) for entry in self.entries)
        yield "\n]}\n"

    def joined(self) -> JoinedCalls:
        """Return all calls, after joining the parts of each call that several ranks recorded.

        Calls without all their parts are omitted, and listed in `missing`.
        """
        return JoinedCalls(self.entries, check=self.checks)

    def __repr__(self) -> str:
        models = [capture.model for capture in self.captures]
        return f"Dataset({self.address!r}, calls={len(self)}, models={models})"

    def _repr_html_(self) -> str:
        damaged = [str(each.error) for each in self.damaged]
        return dataset_html(self.entries, [repr(self), *filter(None, [self.note]), *damaged])

    def __len__(self) -> int:
        return len(self.entries)

    @overload
    def __getitem__(self, index: int) -> AttentionCall: ...
    @overload
    def __getitem__(self, index: slice) -> list[AttentionCall]: ...
    def __getitem__(self, index: int | slice) -> AttentionCall | list[AttentionCall]:
        if isinstance(index, slice):
            return [entry.load(check=self.checks) for entry in self.entries[index]]
        return self.entries[index].load(check=self.checks)

    def __iter__(self) -> Iterator[AttentionCall]:
        return (entry.load(check=self.checks) for entry in self.entries)


def load(where: str | Path, *, check: bool = True) -> Dataset:
    """Open a dataset that `record` or the `capture` command wrote.

    Args:
        where: directory of the dataset, `.zip`, `.tar` or `.tar.gz` archive of the directory, or
            address of a directory or archive: `hf://datasets/ORG/NAME[@REVISION][/FOLDER]`,
            `s3://BUCKET/PATH`, `https://…`, or any other address that fsspec supports (extra
            `remote`). Remote files are copied to a cache when they are loaded.
        check: compare the checksum of every call that is loaded. Without this check, loading is
            faster but altered values are not detected. Sizes, shapes and headers are always
            compared.

    Returns:
        A list-like `Dataset`, which loads a call when it is indexed.

    Example:
        >>> for call in load("captured_inputs"):
        ...     print(call.origin.module, call.shape)

    Raises:
        DatasetError: the dataset is missing, cannot be reached or contains no recorded calls.
    """
    return Dataset.open(where, check=check)


def _missing_records(
    captures: Sequence[CaptureRecord], entries: Iterable[FileEntry]
) -> list[CaptureRecord]:
    """Return a new record for each capture that has entries but no record."""
    recorded = {capture.model for capture in captures}
    entries_of = {entry.origin.model: entry for entry in entries}
    return [_record_of(entry) for model, entry in entries_of.items() if model not in recorded]


def _record_of(entry: FileEntry) -> CaptureRecord:
    """Return a record of a capture with the data that one of its calls contains."""
    origin = entry.origin
    return CaptureRecord(
        model=origin.model, weights=origin.weights, device=origin.device, versions=origin.versions
    )


def _read_manifest(manifest: Path) -> tuple[list[CaptureRecord], list[Any]]:
    """Return a manifest's captures, and its list of files, which is not checked yet."""
    try:
        content = plain_files.read(manifest, LONGEST_MANIFEST)
    except DatasetError as error:
        raise ValueError(error.reason) from error
    data = parsed(content)
    if isinstance(data, dict) and data.get("format") != FORMAT:
        found = shown(data.get("format"))
        raise DatasetError(
            f"format {found}, but this version reads {FORMAT!r}: use the version that wrote it, or "
            "record again",
            manifest,
        )
    records = required(data, "captures", list[Any])
    items = required(data, "files", list[Any])
    if len(records) > _MOST_CAPTURES:
        raise ValueError(f"{len(records)} captures (at most {_MOST_CAPTURES} are read)")
    return [CaptureRecord.from_json(record) for record in records], items


def _checked(manifest: Path, items: list[Any]) -> tuple[dict[Path, FileEntry], list[DamagedFile]]:
    """Return a manifest's readable entries by path, and its damaged entries."""
    entries: dict[Path, FileEntry] = {}
    damaged: list[DamagedFile] = []
    for item in items:
        path = manifest
        try:
            path = file_path(manifest.parent, item)
            if path in entries:
                raise ValueError("listed twice")
            entries[path] = FileEntry.from_json(manifest.parent, item)
        except ValueError as error:
            if len(damaged) == _MOST_DAMAGED:
                raise ValueError(f"more than {_MOST_DAMAGED} damaged entries") from error
            reason = f"its entry in the manifest is damaged ({error})"
            damaged.append(DamagedFile(path, DatasetError(reason, path)))
    return entries, damaged
