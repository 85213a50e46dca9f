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
    """The `stacklevel` at which its caller's warning points at code that is not ours."""
    ours = (str(Path(__file__).parents[1]) + os.sep, contextlib.__file__)
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(ours):
        level, frame = level + 1, frame.f_back
    return level


os.register_at_fork(after_in_child=_abandon_all)
atexit.register(_close_all)  # of a program that ends inside the block; later, no thread runs


class Recording:
    """A recording in progress, with counts of the calls seen and kept so far."""

    def __init__(self, context: RecordingContext) -> None:
        self.capture = context.capture
        self.counts = context.counts
        """What became of calls that are not stored, and what recording has cost."""
        self.problems: list[str] = []
        """What went wrong with the recording, a sentence each; the same reason only once."""
        self.calls = CallRecorder(context, self.tell)
        self.fused = FusedLayers(context.tracker)
        self.audit = Audit(context.tracker) if context.options.audit else None
        """Attention operators that an audit counted; None without one."""
        self.may_have_run = True
        """False after the end, where no watched module ran."""
        self._context, self._target = context, context.target
        self._writer: Writer | None = None
        self._missed_attention: list[MissedAttention] | None = None
        """None until the end: then nothing holds the model any more."""
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
        """Attention that ran without a call being seen: the census lacks it."""
        if self._missed_attention is not None:
            return self._missed_attention
        return find_missed_attention(self._context.tracker, self.fused, self.audit)

    @property
    def summary(self) -> str:
        """One line: by component, how many calls were kept, eligible, and not to be sampled.

        Empty for one component whose calls were all eligible: `kept` and `seen` say as much.
        """
        return self.calls.seen.summary

    def begin(self) -> None:
        """Create the journal; from now on calls are recorded.

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
        """Add to `problems`; the first is warned of at once."""
        if problem in self.problems:
            return
        self.problems.append(problem)
        if next(self._told):
            return
        # Neither an exception, if the user turned warnings into them, nor what the user's own way
        # of showing them raises, must reach the model or the thread that writes.
        try:
            warnings.warn(f"recording: {problem}", RecordingWarning, stacklevel=_level_outside())
        except Exception as error:
            if is_meant_for_program(error):
                raise

    def close(self, *, complete: bool) -> bool:
        """End the recording: write what is in memory and put it into the manifest.

        Returns:
            False if it has ended before, or another thread is ending it. Raises nothing but what
            interrupts it; see `problems`.
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
        finally:  # also after Ctrl-C, once more
            self._end(self._writer, complete=complete)
            self.counts.flush_seconds = time.perf_counter() - began
        return True

    def abandon(self) -> None:
        """Leave the recording to the parent process, in a child that was forked from it."""
        self.calls.is_closed = True
        self.calls.lock = threading.RLock()  # a thread of the parent may have held it
        self._target.abandon()

    def _end(self, writer: Writer, *, complete: bool) -> None:
        """Put what is stored into the manifest."""
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
