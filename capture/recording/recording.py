"""A recording in progress: the calls it sees, keeps and loses, and its end."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import sys
import threading
import time
import warnings
import weakref
from pathlib import Path

from capture.errors import CaptureError, RecordingWarning
from capture.hooks.audit import Audit
from capture.hooks.census import Census
from capture.hooks.missed_attention import FusedLayers, MissedAttention, find_missed_attention
from capture.hooks.signals import is_meant_for_program
from capture.recording.call_recorder import CallRecorder
from capture.recording.context import RecordingContext
from capture.recording.kept_calls import reason_of
from capture.recording.writer import Writer
from capture.text.printable import quoted

_live: weakref.WeakSet[Recording] = weakref.WeakSet()


def _abandon_all() -> None:
    for recording in list(_live):
        recording.abandon()


def _close_all() -> None:
    for recording in list(_live):
        recording.close(complete=False)


def _level_outside() -> int:
    """Return the `stacklevel` at which the caller's warning points at the program's code."""
    ours = (str(Path(__file__).parents[1]) + os.sep, contextlib.__file__)
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(ours):
        level, frame = level + 1, frame.f_back
    return level


os.register_at_fork(after_in_child=_abandon_all)
atexit.register(_close_all)  # for programs that end inside the block, while threads still run


class Recording:
    """A recording in progress, with counts of the calls seen and kept so far."""

    def __init__(self, context: RecordingContext) -> None:
        self.capture = context.capture
        self.counts = context.counts
        """Counts of calls that are not stored, and of the time and memory that recording took."""
        self.problems: list[str] = []
        """Problems of the recording, a sentence each; the same sentence appears only once."""
        self.calls = CallRecorder(context, self.tell)
        self.fused = FusedLayers(context.tracker)
        self.audit = Audit(context.tracker) if context.options.audit else None
        """Attention operators that an audit counted; None without an audit."""
        self.may_have_run = True
        """False after the end if no watched module ran."""
        self._context, self._target = context, context.target
        self._writer: Writer | None = None
        self._missed_attention: list[MissedAttention] | None = None
        """Found at the end, when the model is released; None until then."""
        self._told = itertools.count()

    def __repr__(self) -> str:
        problems = f", problems={len(self.problems)}" if self.problems else ""
        return (
            f"Recording(out={str(self._target.directory)!r}, model={self.capture.model!r}, "
            f"kept={self.kept}, seen={self.seen}{problems})"
        )

    @property
    def census(self) -> Census:
        """Counts of all calls, stored or not."""
        return self.calls.seen.census

    @property
    def seen(self) -> int:
        """Attention calls made so far, anywhere in the process."""
        return self.census.calls

    @property
    def kept(self) -> int:
        """Calls that are stored, or in memory and to be stored."""
        return len(self.calls.kept)

    @property
    def lost(self) -> int:
        """Calls that were chosen and could not be stored."""
        return self.counts.lost

    @property
    def missed_attention(self) -> list[MissedAttention]:
        """Attention that ran without a call being seen, which the census lacks."""
        if self._missed_attention is not None:
            return self._missed_attention
        return find_missed_attention(self._context.tracker, self.fused, self.audit)

    @property
    def summary(self) -> str:
        """Numbers of calls kept, eligible and not sampled, by component, in one line.

        Empty for one component whose calls were all eligible: `kept` and `seen` say as much.
        """
        return self.calls.seen.summary

    def begin(self) -> None:
        """Create the journal, and record calls from now on.

        Raises:
            CaptureError: another process records there, or the directory is not writable.
        """
        options = self._context.options
        journal = self._target.begin(self.capture)
        try:
            writer = Writer(
                journal,
                self.counts,
                buffer_bytes=options.buffer_bytes,
                final=self._context.sampler.is_final,
                durable=options.durable,
                failed=self.calls.kept.failed,
            )
        except CaptureError:
            self._target.withdraw()
            raise
        if journal.note:
            self.tell(journal.note)
        with self.calls.lock:
            self._writer = self.calls.kept.writer = writer
            self.calls.is_closed = False
        _live.add(self)

    def tell(self, problem: str) -> None:
        """Add to `problems`, and issue a warning about the first one at once."""
        if problem in self.problems:
            return
        self.problems.append(problem)
        if next(self._told):
            return
        # Users may turn warnings into exceptions, or show them by functions that raise. Neither may
        # reach the model or the thread that writes.
        try:
            warnings.warn(f"recording: {problem}", RecordingWarning, stacklevel=_level_outside())
        except Exception as error:
            if is_meant_for_program(error):
                raise

    def close(self, *, complete: bool) -> bool:
        """End the recording: write what is in memory and put it into the manifest.

        Returns:
            False if the recording has ended before, or another thread is ending it. Only
            exceptions that interrupt it are raised; the others are added to `problems`.
        """
        with self.calls.lock:
            if self._writer is None:
                return True
            if self.calls.is_closed:
                return False
            self.calls.is_closed = True
        began = time.perf_counter()
        try:
            self._writer.close()
        except Exception as error:
            if is_meant_for_program(error):
                raise
            self.tell(f"{self._target.directory} may not be on the disk yet: {reason_of(error)}")
        finally:  # also after a second Ctrl-C
            self._end(self._writer, complete=complete)
            self.counts.flush_seconds = time.perf_counter() - began
        return True

    def abandon(self) -> None:
        """Leave the recording to the parent process, in a child that was forked from it."""
        self.calls.is_closed = True
        self.calls.lock = threading.RLock()  # the old one may be held by a thread of the parent
        self._target.abandon()

    def _end(self, writer: Writer, *, complete: bool) -> None:
        """Put the stored calls into the manifest."""
        try:
            self.calls.kept.give_up()
            self.capture.complete = complete and not self.lost
            self.capture.census = self.census.to_json()
            self.capture.calls_seen = self.census.calls
            self._missed_attention = self.missed_attention
            self.may_have_run = self._context.tracker.may_have_run
            self._context.tracker.forget()
            self.capture.missed_attention = [each.to_json() for each in self._missed_attention]
            for problem in self._target.end(self.capture, writer.completed):
                self.tell(problem)
        except Exception as error:
            if is_meant_for_program(error):
                raise
            self.tell(
                f"could not end the recording in {self._target.directory}: {reason_of(error)}; "
                f"finish it with `capture repair {quoted(self._target.directory)}`"
            )
