"""Writes recorded calls in a background thread, so that the running model does not wait.

Calls that the sampler may still drop stay in memory, so that few dropped calls are ever written.
Calls are written when the run ends, when half of `buffer_bytes` is full, or immediately with
`durable`. The model waits only when all of `buffer_bytes` is full.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from capture.recording.copies import HostCopy
from capture.recording.counts import RecordingCounts
from capture.recording.memory import BufferPool, HostBuffer
from capture.recording.termination import started
from capture.storage import plain_files
from capture.storage.call_file import PackedCall
from capture.storage.header import CallHeader
from capture.storage.journal import Journal

_POLL_SECONDS = 1.0


@dataclass(frozen=True)
class WaitingCall:
    """A call in memory. The copy of its tensors may still be in progress."""

    header: CallHeader
    copy: HostCopy

    @property
    def index(self) -> int:
        return self.header.origin.call_index


class Writer:
    """The writer of one capture's calls, in files named `STEM-INDEX.safetensors`.

    Args:
        journal: journal that receives a line for every call chosen, dropped or completed. The
            journal's name is the STEM of the files.
        counts: counts of the time that the model waits, and of the bytes written.
        buffer_bytes: memory for calls that wait; a larger call is accepted if no other call waits.
        final: True if the sampler never drops a call, so that every call is written immediately.
        durable: True to write every call to the disk before `put` returns.
        failed: function that receives the index of a call that cannot be written, and the error.
            This function must not raise.
    """

    def __init__(
        self,
        journal: Journal,
        counts: RecordingCounts,
        *,
        buffer_bytes: int,
        final: bool,
        durable: bool,
        failed: Callable[[int, Exception], None],
    ) -> None:
        self.pool = BufferPool(counts)
        self.completed: dict[int, int] = {}
        """Sizes of the complete files, by the index of the call."""
        self._counts = counts
        self._journal = journal
        self._directory = os.stat(journal.path.parent)
        self._buffer_bytes = buffer_bytes
        self._at_once = final or durable
        self._durable = durable
        self._failed = failed
        self._waiting: dict[int, WaitingCall] = {}
        self._writing: int | None = None
        self._dropped = False
        """True if the call that is being written has been dropped."""
        self._reserved = 0
        self._short = 0
        """Number of threads that wait for memory."""
        self._closing = False
        self._undone: list[int] = []
        """Indices of calls to drop, if the journal's line about them could not be written yet."""
        self._changed = threading.Condition()
        self._thread = started(self._work)

    def reserve(self, nbytes: int, *, pinned: bool) -> HostBuffer:
        """Return a buffer, after waiting for calls to be written if memory is short."""
        with self._changed:
            began = time.perf_counter()
            self._short += 1
            try:
                while self._is_busy and self._reserved + nbytes > self._buffer_bytes:
                    self._changed.notify_all()
                    self._changed.wait(_POLL_SECONDS)
            finally:
                self._short -= 1
                self._counts.waited_seconds += time.perf_counter() - began
            buffer = self.pool.take(nbytes, pinned=pinned, limit=self._buffer_bytes)
            self._reserved += buffer.nbytes
            return buffer

    def release(self, buffer: HostBuffer) -> None:
        """Give back a buffer that `reserve` returned."""
        with self._changed:
            self._reserved -= buffer.nbytes
            self.pool.give_back(buffer)
            self._changed.notify_all()

    def put(self, call: WaitingCall, drop: Iterable[int]) -> list[int]:
        """Accept a call for writing, and drop the calls in `drop` from memory or from disk.

        Returns:
            Indices of the dropped calls, including calls that an earlier `put` could not drop.

        Raises:
            OSError: the journal cannot be written. In this case the call is not accepted, its
                buffer is free, and the calls in `drop` stay until the next `put`.
        """
        with self._changed:
            dropped = self._undone = [*self._undone, *drop]
            try:
                self._journal.append(sampled=call.index, dropped=dropped)
            except BaseException:
                self.release(call.copy.buffer)
                raise
            self._waiting[call.index] = call
            self._undone = []
            for index in dropped:
                self._drop(index)
            self._changed.notify_all()
            while self._durable and self._is_busy and not self._is_done(call.index):
                self._changed.wait(_POLL_SECONDS)
            return dropped

    def close(self) -> None:
        """Write the calls in memory, and wait until everything is on the disk.

        If an exception interrupts this method (a second Ctrl-C), the calls in memory are dropped.

        Raises:
            OSError: the disk reports an error.
        """
        try:
            with self._changed:
                self._closing = True
                self._changed.notify_all()
            while self._thread.is_alive():  # with a time-out, so that signals are handled
                self._thread.join(_POLL_SECONDS)
        except BaseException:
            with self._changed:
                for index in [*self._waiting]:
                    self._drop(index)
                self._closing = self._dropped = True
                self._changed.notify_all()
            raise
        is_here = self._is_directory_here()
        for index, nbytes in sorted(self.completed.items()):
            if fault := _fault(self.path(index), nbytes):
                del self.completed[index]
                if is_here:  # in a moved directory, file and journal may still be intact
                    self._journal.append(dropped=[index])
                self._failed(index, OSError(errno.EIO, fault))
        if self.completed:
            _sync_file_system(self._journal.path.parent)

    def path(self, index: int) -> Path:
        """Return the path of a call's file."""
        return self._journal.path.with_name(f"{self._journal.stem}-{index:06d}.safetensors")

    def _is_directory_here(self) -> bool:
        """Return whether the directory still exists at its original path."""
        with contextlib.suppress(OSError):
            return os.path.samestat(os.stat(self._journal.path.parent), self._directory)
        return False

    def _require_directory(self) -> None:
        if not self._is_directory_here():
            raise OSError(errno.ENOENT, "the directory was moved, replaced or deleted meanwhile")

    @property
    def _is_busy(self) -> bool:
        """True if waiting calls will be written, which frees memory."""
        return self._thread.is_alive() and (bool(self._waiting) or self._writing is not None)

    def _is_done(self, index: int) -> bool:
        return index not in self._waiting and index != self._writing

    def _drop(self, index: int) -> None:
        held = self._waiting.pop(index, None)
        if held is not None:
            self.release(held.copy.buffer)
        self._dropped = self._dropped or self._writing == index
        if index in self.completed:
            del self.completed[index]
            with contextlib.suppress(OSError):  # a remaining file is deleted at the end
                self._require_directory()
                self.path(index).unlink()

    def _next(self) -> WaitingCall | None:
        """Wait until a call is due and return it; return None when everything is written."""
        with self._changed:
            while True:
                full = self._short or 2 * self._reserved > self._buffer_bytes
                if self._waiting and (self._closing or self._at_once or full):
                    self._writing = next(iter(self._waiting))
                    return self._waiting.pop(self._writing)
                if self._closing:
                    return None
                self._changed.wait()

    def _work(self) -> None:
        while (call := self._next()) is not None:
            try:
                self._write(call)
            except Exception as error:
                # If the journal cannot be written, a call that it lists is not dropped.
                with contextlib.suppress(OSError), self._changed:
                    self._journal.append(dropped=[call.index])
                    self._drop(call.index)
                self._failed(call.index, error)
            finally:
                with self._changed:
                    self._writing, self._dropped = None, False
                    self.release(call.copy.buffer)
        with self._changed:
            self.pool.close()

    def _write(self, call: WaitingCall) -> None:
        call.copy.wait()
        path = self.path(call.index)
        self._require_directory()
        entry = PackedCall.with_values(call.header, call.copy.values).write(path)
        self._counts.written_bytes += entry.nbytes
        try:
            if self._durable:
                plain_files.sync(path)
                plain_files.sync(path.parent)
            with self._changed:
                if self._dropped:
                    with contextlib.suppress(OSError):
                        path.unlink()
                    return
                self._journal.append(**entry.to_json())
                self.completed[call.index] = entry.nbytes
        except BaseException:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
            raise
        if self._durable:
            self._journal.sync()


def _fault(path: Path, nbytes: int) -> str:
    """Return the fault of a file that was complete before; empty if it has no fault."""
    try:
        found = path.lstat().st_size
    except OSError:
        return "its file is gone"
    return "" if found == nbytes else f"its file has {found} bytes, not {nbytes}"


def _sync_file_system(directory: Path) -> None:
    """Wait until all files in a directory's file system are on the disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        library = ctypes.CDLL(None, use_errno=True)
        if not hasattr(library, "syncfs"):  # not Linux
            os.sync()
        elif library.syncfs(descriptor):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(directory))
    finally:
        os.close(descriptor)
