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
from collections.abc import Iterable, Iterator, Sequence
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
from capture.storage.journal import JournalContents, call_files, journals, stem_of
from capture.storage.json_data import parsed, required, shown
from capture.storage.locations import cached_copy_of, where_instead
from capture.storage.merging import Merging
from capture.storage.names import LONGEST_MANIFEST, MANIFEST
from capture.storage.notebook import dataset_html


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
        dataset = cls.open_or_new(Path(where), cached_copy)
        dataset.checks = check
        if not dataset.entries:
            reasons = [dataset.note, *(str(each.error) for each in dataset.damaged[:3])]
            why = "; ".join(filter(None, reasons))
            raise DatasetError(
                f"{dataset.address}: holds no recorded calls{why and f' ({why})'}"
                f"{where_instead(dataset.directory) if cached_copy is None else ''}"
            )
        return dataset

    @classmethod
    def open_or_new(cls, directory: Path, cached_copy: CachedCopy | None = None) -> Dataset:
        """Open a directory, which may have no recorded calls.

        Args:
            cached_copy: the copy in the cache to open instead.
        """
        if cached_copy is not None:
            directory = cached_copy.directory
        # Journals are read before the manifest. If a capture ends in between, the manifest lists
        # it, because its journal is deleted only after the manifest is written.
        is_local = cached_copy is None and directory.is_dir()
        unfinished = [each for each in journals(directory) if not each.is_empty] if is_local else []
        dataset = cls.listed(directory)
        dataset.cached_copy = cached_copy
        if unfinished:
            dataset._add_unfinished(unfinished)
        if cached_copy is not None:
            dataset.entries = [replace(entry, fetch=cached_copy.fetch) for entry in dataset.entries]
            dataset._name_as_given(cached_copy.address)
        return dataset

    @classmethod
    def listed(cls, directory: Path) -> Dataset:
        """Read only the manifest, without the journals of captures that have not ended."""
        manifest = directory / MANIFEST
        if not os.path.lexists(manifest):
            return cls._rebuilt(directory, f"{manifest} is missing")
        try:
            records, items = _read_manifest(manifest)
            entries, damaged = _checked(manifest, items)
        except ValueError as error:
            return cls._rebuilt(directory, f"{manifest} is damaged ({error})")
        notes = []
        if unchecked := sum(entry.checksum is None for entry in entries.values()):
            notes.append(
                f"{manifest} lacks the checksums of {unchecked} of its files, so that changes to "
                "them would go unnoticed"
            )
        captures = [*{record.model: record for record in records}.values()]
        if len(captures) < len(records):
            notes.append(f"{manifest} lists captures twice, and the last entry of each is read")
        captures += _missing_records(captures, entries.values())
        return cls(directory, list(entries.values()), captures, "; ".join(notes), damaged)

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
        wanted = self.entries if entries is None else entries
        errors = self.cached_copy.fetch_all(wanted, report)
        return [DamagedFile(path, error) for path, error in errors.items()]

    def _name_as_given(self, address: str) -> None:
        """Replace the path of the copy in notes and errors with the dataset's address."""
        self.note = self.note.replace(str(self.directory), address)
        self.damaged = [
            DamagedFile(each.path, DatasetError(each.error.reason, f"{address}/{each.path.name}"))
            for each in self.damaged
        ]

    def _add_unfinished(self, unfinished: Iterable[JournalContents]) -> None:
        files, merging = call_files(self.directory), Merging(self.captures, self.entries)
        notes = [merging.add_unfinished(journal, files) for journal in unfinished]
        self.captures, self.entries = merging.captures, merging.entries
        self.note = "; ".join(filter(None, [self.note, *notes]))

    @classmethod
    def _rebuilt(cls, directory: Path, why: str) -> Dataset:
        entries, damaged = [], []
        # Files are listed before journals are read, because captures may be writing files.
        paths = sorted(directory.glob("[!.]*.safetensors"))
        stems = {journal.stem for journal in journals(directory)}
        for path in paths:
            if stem_of(path) in stems:
                continue
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
    origins = {entry.origin.model: entry.origin for entry in entries}
    return [CaptureRecord.of(each) for model, each in origins.items() if model not in recorded]


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
    return [CaptureRecord.from_json(each) for each in records], required(data, "files", list[Any])


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
            reason = f"its entry in the manifest is damaged ({error})"
            damaged.append(DamagedFile(path, DatasetError(reason, path)))
    return entries, damaged
