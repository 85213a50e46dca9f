"""Manages a recording in progress, from its start to its end."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
import warnings
from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path

from capture.errors import (
    CaptureError,
    RecordingWarning,
    reason_of,
    reraise_from_signal_handler,
)
from capture.hooks.attention_share import AttentionShare
from capture.hooks.census import Census
from capture.hooks.first_nonfinite import FirstNonfinite
from capture.hooks.missed_attention import MissedAttention, find_missed_attention
from capture.hooks.modules import Outermost
from capture.hooks.sampled_step import SampledStep
from capture.recording.call_recorder import CallRecorder
from capture.recording.context import RecordingContext
from capture.recording.summary import Summary
from capture.recording.termination import can_flush
from capture.recording.writer import Writer
from capture.text.printable import quoted

_live: set[Recording] = set()


def _abandon_all() -> None:
    for recording in list(_live):
        recording.abandon()


def _close_all() -> None:
    for recording in list(_live):
        recording.close(complete=False)


def _level_outside() -> int:
    """Return the `stacklevel` with which a warning of the caller points at the program's code."""
    ours = (str(Path(__file__).parents[1]) + os.sep, contextlib.__file__)
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(ours):
        level, frame = level + 1, frame.f_back
    return level


def _warn(text: str) -> None:
    # A warning may raise, by the user's filters or display function. Such an exception must not
    # reach the model or the writer's thread.
    with contextlib.suppress(Exception):
        warnings.warn(f"recording: {text}", RecordingWarning, stacklevel=_level_outside())


os.register_at_fork(after_in_child=_abandon_all)
atexit.register(_close_all)  # for programs that end inside the `with` block


class Recording:
    """A recording in progress, with counts of the calls seen and kept so far."""

    def __init__(self, context: RecordingContext) -> None:
        self.capture = context.capture
        self.counts = context.counts
        """Counts of calls that are not stored, and of the time and memory that recording took."""
        self.problems: list[str] = []
        """Problems of the recording, one sentence each, without repetitions."""
        self._attention_share = AttentionShare(context.tracker)
        self._first_nonfinite = FirstNonfinite(context.tracker, self.tell)
        self.calls = CallRecorder(
            context, self._attention_share.mark, self._first_nonfinite, self.tell
        )
        self._sampled_step = SampledStep(context.tracker)
        self.may_have_run = True
        """False if the recording has ended and no watched module ran."""
        self._context, self._target = context, context.target
        self._writer: Writer | None = None
        self._missed_attention: list[MissedAttention] | None = None
        """Missed attention, set at the end before the model is released; None before the end."""

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
        """Number of attention calls so far, anywhere in the process."""
        return self.census.calls

    @property
    def kept(self) -> int:
        """Number of calls that are stored, or are in memory and will be stored."""
        return len(self.calls.kept)

    @property
    def expected_bytes(self) -> int:
        """Size of the tensors of the kept calls, with gradients that may still come."""
        return self._context.sampler.nbytes

    def steps_begun(self, phases: Collection[str]) -> int:
        """Return the number of steps of these phases so far, while the recording runs.

        A step is a denoising step, or else a forward pass.
        """
        sites = [watched.site for watched in self._context.tracker.watched if watched.role]
        return max((site.step + 1 for site in sites if site.phase in phases), default=0)

    @property
    def lost(self) -> int:
        """Number of calls that were chosen but could not be stored."""
        return self.counts.lost

    @property
    def missed_attention(self) -> list[MissedAttention]:
        """Attention that no entry point saw, and that the census therefore lacks."""
        if self._missed_attention is not None:
            return self._missed_attention
        return find_missed_attention(self._context.tracker, self._sampled_step)

    @property
    def summary(self) -> str:
        """Numbers of calls that are kept, eligible, refused and missed, and the first NaN."""
        return str(self._summary)

    @property
    def _summary(self) -> Summary:
        nonfinite = self.capture.first_nonfinite
        return Summary.of(self._context, self.census, self.missed_attention, nonfinite)

    def watch(self, receiver: Outermost) -> None:
        """Call `receiver` at the start and end of each forward pass of an outermost module."""
        self._context.tracker.outermost.append(receiver)

    def begin(self) -> None:
        """Create the journal, and start to record calls.

        Raises:
            CaptureError: another process records to the directory, or it is not writable.
        """
        journal = self._target.begin(self.capture)
        try:
            writer = Writer(
                journal,
                self.counts,
                buffer_bytes=self._context.buffer_bytes,
                final=self._context.sampler.is_final or not can_flush(),
                durable=self._context.durable,
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
        """Add a problem to `problems`; issue a warning if this is the first problem."""
        if problem in self.problems:
            return
        self.problems.append(problem)
        if len(self.problems) == 1:
            _warn(problem)

    def warn_of_findings(self) -> None:
        """Issue the summary as a warning if calls were refused or missed, or if NaN was found.

        Such a recording has no problem, because the stored calls are not affected.
        """
        if self._summary.has_findings:
            _warn(self.summary)

    def close(self, *, complete: bool) -> bool:
        """End the recording: write the calls in memory, and add all calls to the manifest.

        Only exceptions that interrupt the program are raised; others are added to `problems`.

        Returns:
            False if the recording has already ended, or another thread is ending it.
        """
        with self.calls.lock:
            if self._writer is None:
                return True
            if self.calls.is_closed:
                return False
            self.calls.is_closed = True
        began = time.perf_counter()
        with self._target.released():
            try:
                self._writer.close()
            except Exception as error:
                reraise_from_signal_handler(error)
                directory = self._target.directory
                self.tell(f"{directory} may not be on the disk yet: {reason_of(error)}")
            finally:  # also after a second Ctrl-C
                _live.discard(self)
                self._end(complete=complete)
                self.counts.flush_seconds = time.perf_counter() - began
        return True

    def abandon(self) -> None:
        """Stop recording in a forked child process; the parent process continues the recording."""
        self.calls.is_closed = True
        self.calls.lock = threading.RLock()  # a thread of the parent may hold the old lock
        self._target.abandon()
        _live.discard(self)

    def _end(self, *, complete: bool) -> None:
        """Add the stored calls to the manifest."""
        try:
            self.calls.kept.give_up()
            self.capture.complete = complete and not self.lost
            self.capture.census = self.census.to_json()
            self.capture.calls_seen = self.census.calls
            self._missed_attention = self.missed_attention
            summary = self._summary
            if not (summary.refused or summary.missed):  # whose time is not known
                self.capture.attention_share = self._attention_share.share()
            self.capture.first_nonfinite = self._first_nonfinite.end()
            tracker = self._context.tracker
            self.may_have_run = tracker.may_have_run
            if tracker.unfollowed:
                self.tell(
                    f"{tracker.unfollowed} was called as `.forward(...)`, which counts no steps "
                    "and decides no phase, so a plan may not apply: call the model as `model(...)`"
                )
            tracker.forget()
            self.capture.missed_attention = [*map(asdict, self._missed_attention)]
            for problem in self._target.end(self.capture):
                self.tell(problem)
        except Exception as error:
            reraise_from_signal_handler(error)
            self.tell(
                f"could not end the recording in {self._target.directory}: {reason_of(error)}; "
                f"finish it with `capture repair {quoted(self._target.directory)}`"
            )
