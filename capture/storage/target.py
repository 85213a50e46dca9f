"""Prepares the directory that a capture is written to, and updates its manifest at the end."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from capture.errors import CaptureError, DatasetError
from capture.storage import locks
from capture.storage.capture_record import CaptureRecord
from capture.storage.dataset import Dataset
from capture.storage.journal import Journal, journals, stems
from capture.storage.locations import why_read_only
from capture.storage.locks import locked
from capture.storage.names import JOURNAL
from capture.storage.plain_files import possible
from capture.storage.repair import finish
from capture.text.printable import quoted

_LONGEST = 100
"""Maximum length of a model's name in file names, in characters."""


@dataclass
class CaptureTarget:
    """Directory of a dataset that a capture is written to."""

    directory: Path
    """Absolute path, because a model may change the working directory."""
    model: str
    overwrite: bool
    _journal: Journal | None = None

    @classmethod
    def check(cls, out: str | Path, model: str, *, overwrite: bool) -> CaptureTarget:
        """Check that a capture can start, without deleting anything."""
        if not str(out):
            raise CaptureError("the directory's name is empty; give one with `out=`")
        cls.refuse_read_only(out)
        try:
            target = cls(possible(out).absolute(), model, overwrite)
            target.directory.mkdir(parents=True, exist_ok=True)
            if not os.access(target.directory, os.W_OK | os.X_OK):
                raise CaptureError(_cannot_write(out))
            target._refuse_active()
            target._replaces(Dataset.open_or_new(target.directory))
        except OSError as error:
            raise CaptureError(_cannot_write(out, error)) from error
        return target

    @staticmethod
    def refuse_read_only(out: str | Path) -> None:
        """Raise CaptureError if `out` is an archive or an address."""
        if reason := why_read_only(out):
            raise CaptureError(
                f"{reason}: record into a directory with `out=`, and pack or upload that"
            )

    def begin(self, capture: CaptureRecord) -> Journal:
        """Finish killed captures in the directory, and create the journal of this capture.

        Raises:
            CaptureError: see `check`; or another process records this model to the directory.
        """
        try:
            with locked(self.directory):
                finish(self.directory)
                dataset = Dataset.listed(self.directory)
                self._refuse_active()
                stem = _unused(slug(self.model), stems(self.directory, slug(self.model)))
                path = self.directory / f"{stem}{JOURNAL}"
                replaces = self._replaces(dataset)
                self._journal = Journal.begin(path, capture.to_json(), replaces=replaces)
        except OSError as error:
            raise CaptureError(_cannot_write(self.directory, error)) from error
        return self._journal

    def withdraw(self) -> None:
        """Undo `begin`, because nothing was recorded."""
        assert self._journal is not None
        self._journal.path.unlink(missing_ok=True)
        self._journal.close()

    def end(self, capture: CaptureRecord) -> list[str]:
        """Add the capture to the manifest; return a sentence for each problem.

        Args:
            capture: record of the capture. If it is incomplete and should have replaced an earlier
                capture, the earlier capture is kept, and the new files go to another directory.
        """
        journal, problems = self._journal, []
        assert journal is not None
        try:
            CaptureRecord.from_json(json.loads(json.dumps(capture.to_json())))
        except (TypeError, ValueError) as error:  # a call that JSON cannot express
            problems.append(f"the manifest will lack the census: {error}")
            capture.census = {}
        try:
            journal.append(finished=capture.to_json())
        except OSError as error:
            problems.append(
                "the manifest will lack the census, and list the capture as incomplete: "
                f"{error.strerror}"
            )
        try:
            # The journal stays locked until here, so that no other process adds this capture to
            # the manifest.
            with locked(self.directory, locks.PATIENCE_AT_THE_END_SECONDS):
                if journal.is_in_place:
                    journal.close()
                    sentences = finish(self.directory, own=journal.stem)
                    problems += [sentences[journal.stem]] if journal.stem in sentences else []
                else:
                    problems.append(
                        f"{journal.path} was moved, replaced or deleted meanwhile, so the calls "
                        "are not listed; if the directory was moved, `capture repair` lists its "
                        "calls in the new place"
                    )
        except (OSError, DatasetError) as error:
            reason = (error.strerror if isinstance(error, OSError) else None) or error
            problems.append(
                f"could not write the manifest ({reason}); once the cause is removed, list the "
                f"calls with `capture repair {quoted(self.directory)}`"
            )
        finally:
            journal.close()
        return problems

    @contextlib.contextmanager
    def released(self) -> Iterator[None]:
        """Close the journal at the end of the block, so that a later capture can finish this one
        although a second Ctrl-C interrupted its end."""
        try:
            yield
        finally:
            if self._journal is not None:
                self._journal.close()

    def abandon(self) -> None:
        """Close the journal in a forked child process; the parent continues the capture."""
        if self._journal is not None:
            self._journal.abandon()

    def _refuse_active(self) -> None:
        mine = stems(self.directory, slug(self.model))
        active = {found.active for found in journals(self.directory) if found.stem in mine}
        state = f"another capture of {self.model} is writing to {self.directory}"
        if True in active:
            raise CaptureError(f"{state}; wait, or choose another directory with `out=`")
        if None in active:
            raise CaptureError(
                f"{state} or was killed (the file system has no locks that would show it); if it "
                f"was killed, finish it with `capture repair {quoted(self.directory)}`"
            )

    def _replaces(self, dataset: Dataset) -> bool:
        """Return whether this capture replaces a capture in the dataset; raise if it must not."""
        # Two names with the same slug would write the same files.
        earlier = [c.model for c in dataset.captures if slug(c.model) == slug(self.model)]
        if earlier and not (self.overwrite and earlier == [self.model]):
            remedy = (
                "rename this one" if earlier != [self.model] else "replace it with `overwrite=True`"
            )
            raise CaptureError(
                f"{self.directory} already contains a capture of {earlier[0]}: {remedy}, "
                "or choose another directory with `out=`"
            )
        return bool(earlier)


@contextlib.contextmanager
def no_empty_directory(directory: Path) -> Iterator[None]:
    """Remove `directory` and its parents on exit if they are new and still empty."""
    # `os.path.isdir` is False for names that are invalid; a later check reports them.
    missing = [path for path in (directory, *directory.parents) if not os.path.isdir(path)]
    try:
        yield
    finally:
        for path in missing:
            with contextlib.suppress(OSError, ValueError):
                path.rmdir()


def current_rank() -> int | None:
    """Return the rank of this process; None if there is only one process.

    The rank comes from `torch.distributed`, or else from the environment's RANK and WORLD_SIZE.
    """
    rank = torch.distributed.get_rank() if _is_group() else _environment("RANK")
    return rank if number_of_ranks() > 1 else None


def number_of_ranks() -> int:
    """Return the number of processes that run together; 0 if unknown (see `current_rank`)."""
    return torch.distributed.get_world_size() if _is_group() else _environment("WORLD_SIZE")


def _is_group() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def rank_name(name: str, rank: int | None) -> str:
    """Return the name of a rank's capture; without a rank, this is the model's name."""
    return name if rank is None else f"{name}.rank{rank}"


def slug(name: str) -> str:
    """Make `name` usable as the start of a file name."""
    usable = re.sub(r"[^A-Za-z0-9.]+", "-", name).strip("-.") or "model"
    if len(usable) <= _LONGEST:
        return usable
    return f"{usable[:_LONGEST]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def _unused(stem: str, used: set[str]) -> str:
    number, unused = 1, stem
    while unused in used:
        number += 1
        unused = f"{stem}_{number}"
    return unused


def _environment(name: str) -> int:
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() else 0


def _cannot_write(directory: str | Path, error: Exception | None = None) -> str:
    reason = error.strerror if isinstance(error, OSError) else error
    because = f" ({reason})" if reason else ""
    return f"cannot write to {directory}{because}; choose another with `out=`"
