"""Writes recorded calls in background threads, so that the running model does not wait.

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
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from capture.errors import CaptureError
from capture.recording.copies import HostCopier, HostCopy, buffer_size
from capture.recording.counts import RecordingCounts
from capture.recording.termination import started
from capture.storage import plain_files
from capture.storage.call_file import PackedCall
from capture.storage.header import CallHeader
from capture.storage.journal import Journal

_POLL_SECONDS = 1.0
_THREADS = 4
"""Number of calls that are written at the same time."""
_LARGE = 16 << 20
"""Bytes from which a file is synchronised once written, and not with all others at the end."""


@dataclass(frozen=True)
class WaitingCall:
    """A call in memory. The copy of its tensors may still be in progress."""

    header: CallHeader
    copy: HostCopy
    gradients: HostCopy | None = None

    @property
    def index(self) -> int:
        return self.header.origin.call_index

    @property
    def copies(self) -> tuple[HostCopy, ...]:
        return (self.copy,) if self.gradients is None else (self.copy, self.gradients)


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
        self._held: set[int] = set()
        """Indices of waiting calls whose gradients may still come."""
        self._writing: set[int] = set()
        self._dropped: set[int] = set()
        """Indices of calls that were dropped while they were written."""
        self._reserved = 0
        self._short = 0
        """Number of threads that wait for memory."""
        self._active = 0
        """Number of threads that run."""
        self.is_closing = False
        """True once the recording ends: calls are then written as they are."""
        self._undone: list[int] = []
        """Indices of calls to drop, if the journal's line about them could not be written yet."""
        self._changed = threading.Condition()
        self._copier = HostCopier(buffer_bytes, counts)
        self._threads = [started(self._work)]
        with contextlib.suppress(CaptureError):  # one thread is enough, but slower
            while len(self._threads) < _THREADS:
                self._threads.append(started(self._work))

    def copied(self, tensors: Mapping[str, Tensor]) -> HostCopy:
        """Start copying tensors, after waiting for calls to be written if memory is short."""
        nbytes = buffer_size(tensors)
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
            self._reserved += nbytes
        try:
            return self._copier.copy(tensors)
        except BaseException:
            with self._changed:
                self._reserved -= nbytes
            raise

    def _let_go(self, copy: HostCopy) -> None:
        """Free the memory of a call that will not be written, once no move uses it."""
        copy.arrival.cancel()
        copy.arrival.add_done_callback(lambda _: self._free(copy))

    def _free(self, copy: HostCopy) -> None:
        with self._changed:
            self._reserved -= copy.nbytes
            self._copier.free(copy)
            self._changed.notify_all()

    def put(
        self, call: WaitingCall, drop: Iterable[int], *, gradients_may_come: bool = False
    ) -> list[int]:
        """Accept a call for writing, and drop the calls in `drop` from memory or from disk.

        Args:
            gradients_may_come: True to write the call only after `complete`, or at the end.

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
                self._let_go(call.copy)
                raise
            self._waiting[call.index] = call
            if gradients_may_come:
                self._held.add(call.index)
            self._undone = []
            for index in dropped:
                self._drop(index)
            self._changed.notify_all()
            self._wait_if_durable(call.index)
            return dropped

    def complete(self, index: int, header: CallHeader, gradients: HostCopy) -> bool:
        """Add the gradients of a waiting call, which can then be written.

        Args:
            header: the call's header, with the gradients.

        Returns:
            False if the call was dropped, or is already being written.
        """
        with self._changed:
            self._held.discard(index)
            call = self._waiting.get(index)
            if call is None:
                self._let_go(gradients)
                return False
            self._waiting[index] = replace(call, header=header, gradients=gradients)
            self._changed.notify_all()
            self._wait_if_durable(index)
            return True

    def _wait_if_durable(self, index: int) -> None:
        while self._durable and self._is_busy and not self._is_done(index):
            self._changed.wait(_POLL_SECONDS)

    def close(self) -> None:
        """Write the calls in memory, and wait until everything is on the disk.

        If an exception interrupts this method (a second Ctrl-C), the calls in memory are dropped.

        Raises:
            OSError: the disk reports an error.
        """
        try:
            with self._changed:
                self.is_closing = True
                self._changed.notify_all()
            self._copier.pool.close()  # the memory of each call is released after writing
            for thread in self._threads:
                while thread.is_alive():  # with a time-out, so that signals are handled
                    thread.join(_POLL_SECONDS)
        except BaseException:
            with self._changed:
                for index in [*self._waiting]:
                    self._drop(index)
                self.is_closing = True
                self._dropped |= self._writing
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
        is_alive = any(thread.is_alive() for thread in self._threads)
        return is_alive and bool(self._waiting.keys() - self._held or self._writing)

    def _is_done(self, index: int) -> bool:
        is_due = index in self._waiting and index not in self._held
        return not is_due and index not in self._writing

    def _drop(self, index: int) -> None:
        self._held.discard(index)
        call = self._waiting.pop(index, None)
        for copy in () if call is None else call.copies:
            self._let_go(copy)
        if index in self._writing:
            self._dropped.add(index)
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
                if self.is_closing:
                    self._held.clear()
                due = (index for index in self._waiting if index not in self._held)
                index = next(due, None)
                if index is not None and (self.is_closing or self._at_once or full):
                    self._writing.add(index)
                    return self._waiting.pop(index)
                if self.is_closing:
                    return None
                self._changed.wait()

    def _work(self) -> None:
        with self._changed:
            self._active += 1
        while self._write_next():
            pass
        with self._changed:
            self._active -= 1
            is_last = not self._active
        if is_last:
            self._copier.close()

    def _write_next(self) -> bool:
        """Write the next call; return False when everything is written."""
        call = self._next()
        if call is None:
            return False
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
                self._writing.discard(call.index)
                self._dropped.discard(call.index)
                for copy in call.copies:
                    self._free(copy)
        return True

    def _write(self, call: WaitingCall) -> None:
        values = {
            name: tensor
            for copy in call.copies
            for name, tensor in copy.arrival.result().tensors.items()
        }
        path = self.path(call.index)
        self._require_directory()
        entry = PackedCall.with_values(call.header, values).write(path)
        try:
            if self._durable or entry.nbytes >= _LARGE:
                plain_files.sync(path)
            if self._durable:
                plain_files.sync(path.parent)
            with self._changed:
                self._counts.written_bytes += entry.nbytes
                if call.index in self._dropped:
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
