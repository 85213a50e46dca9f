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
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from capture.errors import CaptureError, RecordingWarning
from capture.hooks.audit import Audit
from capture.hooks.autocast import autocast_dtype, cast, is_any_enabled
from capture.hooks.census import Census
from capture.hooks.interceptor import TORCH_SDPA, Arguments, Observer, bind
from capture.hooks.missed_attention import FusedLayers, MissedAttention, find_missed_attention
from capture.hooks.modes import outside_of_modes
from capture.hooks.modules import ModuleTracker, outside
from capture.hooks.signals import is_meant_for_program
from capture.recording.call_builder import has_symbolic_sizes
from capture.recording.kept_calls import KeptCalls, reason_of
from capture.recording.parts import RankPart
from capture.recording.sampling import Sampler
from capture.recording.seen_calls import SeenCalls
from capture.recording.writer import Writer
from capture.storage.capture_record import CaptureRecord
from capture.storage.target import CaptureTarget
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

    def __init__(
        self,
        tracker: ModuleTracker,
        sampler: Sampler,
        target: CaptureTarget,
        capture: CaptureRecord,
        *,
        seed: int | None,
        rank: int | None,
        part: RankPart | None,
        keeps_output: bool,
        heads: Sequence[int] | None,
        buffer_bytes: int,
        durable: bool,
    ) -> None:
        self.capture = capture
        self.problems: list[str] = []
        """What went wrong with the recording, a sentence each; the same reason only once."""
        self.buffer_bytes = buffer_bytes
        """Host memory for calls that wait to be written."""
        self.flush_seconds = 0.0
        """How long it took, after the model had returned, until everything was on the disk."""
        self._has_ranks = rank is not None
        self._durable = durable
        self._tracker = tracker
        self._sampler = sampler
        self._target = target
        self._writer: Writer | None = None
        self.may_have_run = True
        """False after the end, where no watched module ran."""
        self._missed_attention: list[MissedAttention] | None = None
        """None until the end: then nothing holds the model any more."""
        self.fused = FusedLayers(tracker)
        self.audit: Audit | None = None
        """What an audit counted; None without one."""
        self._next_index = itertools.count().__next__
        self._told = itertools.count()
        self._lock = threading.RLock()
        self._calls_seen = SeenCalls(tracker, sampler, capture, self._lock)
        self._calls_kept = KeptCalls(
            self._calls_seen,
            tracker,
            sampler,
            capture,
            target.directory,
            self.tell,
            seed=seed,
            rank=rank,
            part=part,
            keeps_output=keeps_output,
            heads=heads,
        )
        self._closed = True

    def __repr__(self) -> str:
        problems = f", problems={len(self.problems)}" if self.problems else ""
        return (
            f"Recording(out={str(self._target.directory)!r}, model={self.capture.model!r}, "
            f"kept={self.kept}, seen={self.seen}{problems})"
        )

    @property
    def census(self) -> Census:
        """Counts of all calls, stored or not."""
        return self._calls_seen.census

    @property
    def seen(self) -> int:
        """SDPA calls made so far, anywhere in the process."""
        return self.census.calls

    @property
    def kept(self) -> int:
        """Calls that are stored, or in memory and to be stored."""
        return len(self._calls_kept)

    @property
    def lost(self) -> int:
        """Calls that were chosen and could not be stored."""
        return self._calls_kept.lost

    @property
    def without_values(self) -> int:
        """Calls that cannot be stored: meta, fake or nested tensors, inside `vmap` or a trace."""
        return self._calls_kept.without_values

    @property
    def without_heads(self) -> int:
        """Calls that cannot be stored because there is no call of just the wanted heads."""
        return self._calls_kept.without_heads

    @property
    def missed_attention(self) -> list[MissedAttention]:
        """Attention that ran without a call being seen: the census lacks it."""
        if self._missed_attention is not None:
            return self._missed_attention
        return find_missed_attention(self._tracker, self.fused, self.audit)

    @property
    def summary(self) -> str:
        """One line: by component, how many calls were kept, eligible, and not to be sampled.

        Empty for one component whose calls were all eligible, of which `kept` and `seen` tell.
        """
        return self._calls_seen.summary

    @property
    def nbytes(self) -> int:
        """Size of the tensors of the calls in `kept`."""
        return self._calls_kept.nbytes

    @property
    def refused_for_bytes(self) -> int:
        """Calls not kept because of `max_bytes`."""
        return self._sampler.refused_for_bytes

    @property
    def waited_seconds(self) -> float:
        """Time that the model waited because `buffer_bytes` of calls were still to be written."""
        return self._writer.waited_seconds if self._writer else 0.0

    @property
    def allocation_seconds(self) -> float:
        """Time that allocating and pinning host memory took, during the model's run."""
        return self._writer.pool.allocation_seconds if self._writer else 0.0

    @property
    def written_bytes(self) -> int:
        """Size of all files written, also of those deleted since for better ones."""
        return self._writer.written_bytes if self._writer else 0

    def begin(self) -> None:
        """Create the journal; from now on calls are recorded.

        Raises:
            CaptureError: another process records there, or the directory is not writable.
        """
        journal = self._target.begin(self.capture)
        try:
            writer = Writer(
                journal,
                buffer_bytes=self.buffer_bytes,
                final=self._sampler.is_final,
                durable=self._durable,
                failed=self._calls_kept.failed,
            )
        except CaptureError:
            self._target.withdraw()
            raise
        if journal.note:
            self.tell(journal.note)
        with self._lock:
            self._writer = self._calls_kept.writer = writer
            self._closed = False
        _live.add(self)

    def observer(self) -> Observer:
        """Return what counts each call, and stores it if the sampler selects it.

        Every call of the model passes here, and most are to cost as little as possible: one look-up
        in a dictionary. They take no lock: the GIL is not released within `+= 1`, and what the
        sampler refused stays refused until it changes.
        """
        alike, running, sampler = self._calls_seen.groups, self._tracker.running, self._sampler
        wants, lock, next_index = sampler.wants, self._lock, self._next_index
        visit = self._calls_seen.visit if self._has_ranks else None
        is_tracing = torch._C._is_tracing

        def observe(
            output: object,
            sdpa: Callable[..., Tensor],
            query: Tensor,
            key: Tensor,
            value: Tensor,
            attn_mask: Tensor | None = None,
            dropout_p: float = 0.0,
            is_causal: bool = False,
            *,
            scale: float | None = None,
            enable_gqa: bool = False,
        ) -> None:
            if self._closed:
                return
            # What we do would become part of the trace, of torch.jit or torch.fx.
            if is_tracing() or not isinstance(output, Tensor):
                self._calls_kept.without_values += 1
                return
            try:
                stack = running.stack
                site = stack[-1][1] if stack else outside()
                module, step, phase = site
                dtype = autocast_dtype(query) if is_any_enabled() and sdpa is TORCH_SDPA else None
                like: tuple[object, ...] | None
                try:
                    like = (
                        module,
                        phase,
                        query.shape,
                        key.shape,
                        value.shape,
                        query.dtype,
                        None
                        if attn_mask is None
                        else (attn_mask.shape, attn_mask.dtype, getattr(attn_mask, "variant", 0)),
                        is_causal,
                        scale,
                        enable_gqa,
                        dtype,
                    )
                    known = alike.get(like)
                except (RuntimeError, TypeError) as error:
                    if is_meant_for_program(error):
                        raise
                    like = known = None  # not every tensor has a shape to compare
                if known is None:
                    if has_symbolic_sizes(query, key, value):
                        self._calls_kept.without_values += 1
                        return
                    arguments = bind(
                        query,
                        key,
                        value,
                        attn_mask,
                        dropout_p,
                        is_causal,
                        scale=scale,
                        enable_gqa=enable_gqa,
                    )
                    known = self._calls_seen.find(like, site, arguments, dtype)
                index = next_index()
                count, place = known.count, known.place
                count.calls += 1
                count.last_step = step
                if visit is not None:
                    visit(site)
                if place is None or (
                    known.refused_step == step and known.refused_at == sampler.changes
                ):
                    return
                # Held until the copies are queued, so that files change in the order of decisions.
                with lock:
                    changes = sampler.changes
                    if not wants(place, step):
                        known.refused_step, known.refused_at = step, changes
                    elif not self._closed:
                        arguments = bind(
                            query,
                            key,
                            value,
                            attn_mask,
                            dropout_p,
                            is_causal,
                            scale=scale,
                            enable_gqa=enable_gqa,
                        )
                        with outside_of_modes():
                            arguments = cast(arguments, dtype)
                            self._calls_kept.store(
                                index, site, place, count, arguments, output, sdpa
                            )
            except Exception as error:
                if is_meant_for_program(error):
                    raise
                self.tell(f"an attention call could not be recorded: {reason_of(error)}")

        return observe

    def handle(
        self,
        arguments: Arguments,
        proceed: Callable[[], Tensor],
        function: Callable[..., Tensor],
    ) -> Tensor:
        """Count a call that came by another road than SDPA, and store it if it is selected."""
        output = proceed()
        if self._closed:
            return output
        if torch._C._is_tracing() or not isinstance(output, Tensor):
            self._calls_kept.without_values += 1
            return output
        try:
            if has_symbolic_sizes(*arguments[:3]):
                self._calls_kept.without_values += 1
                return output
            site = self._tracker.site
            mask, packed, table = (
                arguments.attn_mask,
                arguments.cu_seqlens_q,
                arguments.page_table,
            )
            like = (
                site.module,
                site.phase,
                *(each.shape for each in arguments[:3]),
                arguments.query.dtype,
                None if mask is None else (mask.shape, mask.dtype),
                None if packed is None else packed.shape,
                None if table is None else table.shape,
                *(each is None for each in (arguments.sinks, arguments.seqused_k)),
                arguments[5:8],
                *arguments[-5:],
            )
            known = self._calls_seen.groups.get(like) or self._calls_seen.find(
                like, site, arguments, None
            )
            index = self._next_index()
            known.count.calls += 1
            known.count.last_step = site.step
            if self._has_ranks:
                self._calls_seen.visit(site)
            with self._lock:
                place = known.place
                if place and self._sampler.wants(place, site.step) and not self._closed:
                    with outside_of_modes():
                        self._calls_kept.store(
                            index, site, place, known.count, arguments, output, function
                        )
        except Exception as error:
            if is_meant_for_program(error):
                raise
            self.tell(f"an attention call could not be recorded: {reason_of(error)}")
        return output

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
        with self._lock:
            if self._writer is None:
                return True
            if self._closed:
                return False
            self._closed = True
        began = time.perf_counter()
        try:
            self._writer.close()
        except Exception as error:
            if is_meant_for_program(error):
                raise
            self.tell(f"{self._target.directory} may not be on the disk yet: {reason_of(error)}")
        finally:  # also after Ctrl-C, once more
            self._end(self._writer, complete=complete)
            self.flush_seconds = time.perf_counter() - began
        return True

    def abandon(self) -> None:
        """Leave the recording to the parent process, in a child that was forked from it."""
        self._closed = True
        self._lock = threading.RLock()  # a thread of the parent may have held it
        self._target.abandon()

    def _end(self, writer: Writer, *, complete: bool) -> None:
        """Put what is stored into the manifest."""
        try:
            self._calls_kept.give_up()
            self.capture.complete = complete and not self.lost
            self.capture.census = self.census.to_json()
            self.capture.calls_seen = self.census.calls
            self._missed_attention = self.missed_attention
            self.may_have_run = self._tracker.may_have_run
            self._tracker.forget()
            self.capture.missed_attention = [each.to_json() for each in self._missed_attention]
            for problem in self._target.end(self.capture, writer.completed):
                self.tell(problem)
        except Exception as error:
            if is_meant_for_program(error):
                raise
            self.tell(
                f"could not end the recording in {self._target.directory}: {reason_of(error)}; "
                f"finish it with `capture --repair {quoted(self._target.directory)}`"
            )
