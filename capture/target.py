"""The directory that a capture goes to, before, at the beginning and at the end of it."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from capture.capture_record import CaptureRecord
from capture.dataset import Dataset
from capture.errors import CaptureError, DatasetError
from capture.journal import SUFFIX, Journal, journals, stems
from capture.locks import locked
from capture.repair import finish

_LONGEST = 100
"""Characters of a model's name in file names."""


@dataclass
class Target:
    """A dataset's directory, and the capture that is to be added to it."""

    directory: Path
    """Absolute, since a model may change the working directory."""
    model: str
    overwrite: bool
    _journal: Journal | None = None
    _replaced: bool = False

    @classmethod
    def check(cls, out: str | Path, model: str, *, overwrite: bool) -> Target:
        """Make sure that a capture can begin, without deleting anything.

        Raises:
            CaptureError: `out` is not writable, or contains a capture of `model` and `overwrite`
                is False.
        """
        if not str(out):
            raise CaptureError("the directory has no name; give one with `out=`")
        directory = Path(out).absolute()
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CaptureError(_cannot_write(directory, error.strerror)) from error
        if not os.access(directory, os.W_OK | os.X_OK):
            raise CaptureError(_cannot_write(directory))
        target = cls(directory, model, overwrite)
        target._refuse_active()
        target._replaces(Dataset.open_or_new(directory))
        return target

    def begin(self, capture: CaptureRecord) -> Journal:
        """Finish what killed captures left in the directory, and create this one's journal.

        Raises:
            CaptureError: see `check`; or another process records this model there.
        """
        try:
            with locked(self.directory):
                finish(self.directory)
                dataset = Dataset.listed(self.directory)
                self._refuse_active()
                stem = _unused(slug(self.model), stems(self.directory, slug(self.model)))
                path = self.directory / f"{stem}{SUFFIX}"
                self._replaced = self._replaces(dataset)
                self._journal = Journal.begin(path, asdict(capture), replaces=self._replaced)
        except OSError as error:
            raise CaptureError(_cannot_write(self.directory, error.strerror)) from error
        return self._journal

    def end(self, capture: dict[str, Any]) -> list[str]:
        """Put the capture into the manifest; return what went wrong, a sentence each.

        Args:
            capture: the capture's record. If it is not complete and was to replace another, that
                one stays and this one's files go to a directory of their own.
        """
        assert self._journal is not None
        problems = []
        try:
            self._journal.append(finished=capture)
            self._journal.sync()
        except OSError as error:
            problems.append(f"the manifest will lack the census: {error.strerror}")
        self._journal.close()
        try:
            with locked(self.directory):
                told = finish(self.directory)
        except (OSError, DatasetError) as error:
            problems.append(
                f"could not write the manifest ({error}): the calls are readable, and listed after "
                f"`capture --repair {self.directory}`"
            )
        else:
            if self._replaced and self._journal.stem in told:
                problems.append(told[self._journal.stem])
        return problems

    def abandon(self) -> None:
        """Leave the capture to the parent process; for a forked child."""
        if self._journal is not None:
            self._journal.close()

    def _refuse_active(self) -> None:
        mine = stems(self.directory, slug(self.model))
        if any(each.active and each.stem in mine for each in journals(self.directory)):
            raise CaptureError(
                f"another capture of {self.model} is writing to {self.directory}; wait, or choose "
                "another directory with `out=`"
            )

    def _replaces(self, dataset: Dataset) -> bool:
        """Whether the capture is to replace one in the dataset, if that is allowed."""
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
    """Remove `directory` on exit if it is empty and did not exist before."""
    existed = directory.is_dir()
    try:
        yield
    finally:
        if not existed:
            with contextlib.suppress(OSError):
                directory.rmdir()


def rank_name(name: str) -> str:
    """Return the capture's name in this process: with its rank, if there are several."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    else:
        rank, ranks = (_environment(each) for each in ("RANK", "WORLD_SIZE"))
    return f"{name}.rank{rank}" if ranks > 1 else name


def slug(name: str) -> str:
    """Make `name` usable as the start of a file name."""
    usable = re.sub(r"[^A-Za-z0-9.]+", "-", name).strip("-.") or "model"
    if len(usable) <= _LONGEST:
        return usable
    return f"{usable[:_LONGEST]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def _unused(stem: str, used: list[str]) -> str:
    number, unused = 1, stem
    while unused in used:
        number += 1
        unused = f"{stem}_{number}"
    return unused


def _environment(name: str) -> int:
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() else 0


def _cannot_write(directory: Path, reason: str | None = None) -> str:
    because = f" ({reason})" if reason else ""
    return f"cannot write to {directory}{because}; choose another with `out=`"
