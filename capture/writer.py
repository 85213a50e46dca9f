"""Writes recorded calls in a background thread, to slow the running model down little."""

from __future__ import annotations

import queue
import re
import threading
from collections.abc import Callable
from typing import Any

from capture.call_file import PackedCall
from capture.capture_record import CaptureRecord
from capture.dataset import Dataset
from capture.errors import CaptureError


class Writer:
    """Adds one capture to a dataset from a background thread.

    After every file the manifest on disk lists exactly the files that exist, so that a run killed
    at any moment leaves a readable dataset. At most `_WAITING` calls are queued in memory; then
    `put` waits for the disk.
    """

    _WAITING = 2

    def __init__(self, dataset: Dataset, capture: CaptureRecord) -> None:
        self._dataset = dataset
        self._capture = capture
        self._failure: Exception | None = None
        self._queue: queue.Queue[tuple[PackedCall, tuple[int, ...], dict[str, Any]] | None]
        self._queue = queue.Queue(self._WAITING)
        self._thread = threading.Thread(target=self._work, name="capture-writer", daemon=True)
        self._begun = False

    def put(self, call: PackedCall, drop: tuple[int, ...], census: dict[str, Any]) -> None:
        """Queue `call` to be written, after which the files of the calls in `drop` are deleted.

        Calls are written one at a time, in order. The first one replaces an earlier capture of the
        same model, so that a run that records nothing deletes nothing.

        Raises:
            CaptureError: an earlier file could not be written.
        """
        self._raise_failure()
        if not self._begun:
            self._begun = True
            self._thread.start()
        self._queue.put((call, drop, census))

    def close(self, census: dict[str, Any], *, complete: bool) -> None:
        """Write the queued calls and the final manifest.

        Raises:
            CaptureError: a file could not be written.
        """
        if not self._begun:
            return
        self._queue.put(None)
        self._thread.join()
        self._capture.complete = complete
        self._attempt(self._save, census)
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise CaptureError(
                f"could not write to {self._dataset.directory}: {self._failure}; "
                "the calls written before remain readable"
            ) from self._failure

    def _work(self) -> None:
        self._attempt(self._replace_earlier)
        while (item := self._queue.get()) is not None:
            self._attempt(self._write, *item)

    def _attempt(self, action: Callable[..., None], *arguments: Any) -> None:
        """Run `action` unless one failed before; the next `put` or `close` raises that failure."""
        if self._failure is None:
            try:
                action(*arguments)
            except Exception as error:  # safetensors raises its own type for a full disk
                self._failure = error

    def _replace_earlier(self) -> None:
        same = [e for e in self._dataset.entries if e.origin.model == self._capture.model]
        self._dataset.entries = [e for e in self._dataset.entries if e not in same]
        others = [c for c in self._dataset.captures if c.model != self._capture.model]
        self._dataset.captures = [*others, self._capture]
        self._dataset.save_manifest()
        for entry in same:
            entry.path.unlink(missing_ok=True)

    def _write(self, call: PackedCall, drop: tuple[int, ...], census: dict[str, Any]) -> None:
        origin = call.header.origin
        gone = [
            entry
            for entry in self._dataset.entries
            if entry.origin.model == origin.model and entry.origin.call_index in drop
        ]
        name = f"{slug(origin.model)}-{origin.call_index:06d}.safetensors"
        self._dataset.entries.append(call.write(self._dataset.directory / name))
        for entry in gone:
            self._dataset.entries.remove(entry)
        self._dataset.entries.sort(key=self._position)
        self._save(census)
        for entry in gone:
            entry.path.unlink(missing_ok=True)

    def _position(self, entry: Any) -> tuple[int, int]:
        models = [capture.model for capture in self._dataset.captures]
        return models.index(entry.origin.model), entry.origin.call_index

    def _save(self, census: dict[str, Any]) -> None:
        self._capture.census = census
        self._capture.calls_seen = sum(row["calls"] for row in census["rows"])
        self._dataset.save_manifest()


def slug(name: str) -> str:
    """Make `name` usable as the start of a file name."""
    return re.sub(r"[^A-Za-z0-9.]+", "-", name).strip("-.") or "model"
