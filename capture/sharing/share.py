"""Function `share`, which writes a copy of a recording that others can use."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from capture.errors import CaptureError, DatasetError
from capture.sharing.benchmark_file import BenchmarkFile, benchmark_file, check_name
from capture.sharing.card import CARD, card
from capture.sharing.selection import Selection
from capture.storage import remote
from capture.storage.archives import is_archive
from capture.storage.cached_copy import ProgressReport, no_report
from capture.storage.call_file import FileEntry
from capture.storage.dataset import Dataset
from capture.storage.joined_calls import is_part
from capture.storage.names import MANIFEST, is_of_dataset
from capture.storage.plain_files import possible
from capture.storage.target import no_empty_directory
from capture.storage.upload import HubDataset, refuse_existing, upload
from capture.text.limits import positive
from capture.text.printable import quoted


@dataclass(frozen=True)
class Shared:
    """Result of `share`."""

    address: str
    """Directory or address of the copy."""
    calls: int
    recorded: int
    """Number of calls in the recording."""
    nbytes: int
    """Size of the calls' files."""
    prompts: tuple[str, ...]
    """Prompts in the settings that the copy contains."""
    benchmark: BenchmarkFile | None = None


def share(
    where: str | Path,
    to: str | Path,
    *,
    license: str = "",
    keep: int | str | None = None,
    rows: str | Path | None = None,
    max_bytes: int | None = None,
    benchmark: str | Path | None = None,
    overwrite: bool = False,
    report: ProgressReport = no_report,
) -> Shared:
    """Write a copy of a recording with a dataset card, to a directory or an address.

    The copy appears when it is complete. Every file is compared with its checksum.

    Args:
        where: directory of the recording, an archive or an address (see `load`).
        to: new directory, or `hf://datasets/USER/NAME`, or another address that fsspec can write.
        license: the Hub's identifier of the copy's licence, such as `cc-by-4.0`; required for the
            Hub.
        keep: number of calls, spread over layers, steps, phases and shapes; or `worst:N` or
            `slowest:N`, the calls that a kernel is worst at; None for all.
        rows: for `worst:N` and `slowest:N`, file of rows that `replay --json` wrote.
        max_bytes: maximum size of the calls' files.
        benchmark: file to write a benchmark of the calls to, for `kernels benchmark`.
        overwrite: replace an earlier copy.
        report: function that receives the progress of copies to the cache.

    Returns:
        The place of the copy, and what it contains.

    Example:
        >>> share("captured_inputs", "shared", license="cc-by-4.0", keep=20)

    Raises:
        Error: an argument cannot be used, the recording is damaged or incomplete, or the copy
            cannot be written.
    """
    to = os.fspath(to)
    try:
        selection = Selection() if keep is None else Selection.parse(str(keep))
        if max_bytes is not None:
            positive("max_bytes", max_bytes)
    except ValueError as error:
        raise CaptureError(f"{error}") from error
    hub = HubDataset.parse(to)
    _check_license(license, is_needed=hub is not None)
    script = None if benchmark is None else Path(benchmark)
    if script is not None:
        check_name(script)
        if remote.is_address(to) and hub is None:
            raise CaptureError("a benchmark reads a directory or hf://: name one with `to=`")
        if script.exists() and not overwrite:
            raise CaptureError(f"{script} exists: replace it with `overwrite=True`")
    _check_target(to, overwrite=overwrite)
    dataset = Dataset.open(where, report=report)
    _refuse_incomplete(dataset)
    if (keep is not None or max_bytes is not None) and any(
        is_part(entry.origin) for entry in dataset.entries
    ):
        raise CaptureError(
            "the calls are parts that ranks share, so all are copied: leave out `keep=` and "
            "`max_bytes=`"
        )
    entries = selection.kept(dataset.entries, rows, max_bytes, dataset.address)
    for damaged in dataset.fetch(entries, report):
        raise damaged.error
    made = None if script is None else benchmark_file(entries, hub or Path(to).absolute(), script)
    with _writing(to):
        copy = _write(dataset, entries, selection.left_out(len(entries), len(dataset)), to, license)
        if script is not None and made is not None:
            script.parent.mkdir(parents=True, exist_ok=True)
            script.write_text(made.text, encoding="utf-8")
    prompts = (capture.settings.get("prompt") for capture in copy.captures)
    return Shared(
        remote.without_secrets(to),
        len(copy),
        len(dataset),
        copy.nbytes,
        tuple(dict.fromkeys(prompt for prompt in prompts if isinstance(prompt, str) and prompt)),
        made,
    )


def _check_license(license: str, *, is_needed: bool) -> None:
    if license and not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", license):
        raise CaptureError(
            f"`license=` {license!r} is not an identifier of the Hub, such as cc-by-4.0 or other"
        )
    if is_needed and not license:
        raise CaptureError(
            "a dataset of the Hub needs `license=`, such as cc-by-4.0, or other if the licence of "
            "the model's weights decides"
        )


def _check_target(to: str, *, overwrite: bool) -> None:
    """Raise an error if the copy cannot be written there, before anything is read."""
    if remote.is_address(to):
        if not (overwrite and HubDataset.parse(to)):
            refuse_existing(to)
        return
    with _writing(to):
        path = possible(to)
    if is_archive(to) and not path.is_dir():
        raise CaptureError(f"{to} is an archive: share into a directory with `to=`, and pack that")
    if not os.path.lexists(path):
        return
    if not path.is_dir() or path.is_symlink():
        raise CaptureError(f"{to} is not a directory: name another with `to=`")
    names = os.listdir(path)
    if names and not overwrite:
        raise CaptureError(f"{to} exists: replace it with `overwrite=True`, or name another")
    # `overwrite` must not delete anything that `share` did not write.
    if names and not {MANIFEST, CARD} <= set(names):
        raise CaptureError(f"{to} is not a shared copy, so it stays: name another with `to=`")
    if other := sorted(name for name in names if name != CARD and not is_of_dataset(name)):
        raise CaptureError(f"{to} also contains {other[0]}, so it stays: name another with `to=`")


def _refuse_incomplete(dataset: Dataset) -> None:
    """Raise DatasetError if a copy would not be a complete and verified recording."""
    fault = dataset.note or next((str(each.error) for each in dataset.damaged), "")
    if fault:
        remedy = "share the directory that it was made from"
        if dataset.cached_copy is None:
            remedy = f"run `capture repair {quoted(dataset.directory)}` first"
        raise DatasetError(f"{dataset.address} is incomplete ({fault}): {remedy}")


def _write(
    dataset: Dataset,
    entries: list[FileEntry],
    left_out: str,
    to: str,
    license: str,
) -> Dataset:
    """Write the copy beside its place, and move or upload it; return the copy."""
    models = {entry.origin.model for entry in entries}
    captures = [
        replace(capture, left_out="; ".join(filter(None, (capture.left_out, left_out))))
        for capture in dataset.captures
        if capture.model in models
    ]
    with _staging(to) as directory:
        copy = Dataset(directory, [_copied(entry, directory) for entry in entries], captures)
        copy.save_manifest()
        # The card does not name directories of this machine.
        known = remote.without_secrets(to) if remote.is_address(to) else Path(to).absolute().name
        text = card(copy, known, license)
        (directory / CARD).write_text(text, encoding="utf-8")
        if remote.is_address(to):
            upload(directory, to)
        else:
            _replace(directory, Path(to))
    return copy


@contextlib.contextmanager
def _staging(to: str) -> Iterator[Path]:
    """Yield a new directory, on the target's file system if the target is local."""
    if remote.is_address(to):
        with tempfile.TemporaryDirectory(prefix="attention-replay-") as temporary:
            yield Path(temporary)
        return
    target = Path(to).absolute()
    with no_empty_directory(target.parent):
        target.parent.mkdir(parents=True, exist_ok=True)
        directory = target.parent / f".{secrets.token_hex(8)}.part"
        directory.mkdir()
        try:
            yield directory
        finally:
            shutil.rmtree(directory, ignore_errors=True)


def _copied(entry: FileEntry, directory: Path) -> FileEntry:
    """Check a call's file, and copy it."""
    entry.check()
    path = directory / entry.path.name
    shutil.copyfile(entry.path, path)
    return replace(entry, path=path, fetch=None)


def _replace(directory: Path, target: Path) -> None:
    """Rename a directory to its place; an earlier copy there is deleted afterwards."""
    earlier = directory.with_suffix(".old")
    if target.is_dir():
        target.rename(earlier)
    try:
        directory.rename(target)
    except OSError:
        if earlier.is_dir():
            earlier.rename(target)
        raise
    shutil.rmtree(earlier, ignore_errors=True)


@contextlib.contextmanager
def _writing(to: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise CaptureError(f"cannot write {to} ({reason}): name another with `to=`") from error
