"""Counts the calls that a recording has seen, in groups of similar calls."""

from __future__ import annotations

import contextlib
import math
import threading
from dataclasses import dataclass

import torch
from torch import Tensor

from capture.call.batch import Batch, is_batch
from capture.hooks.census import CallCount, Census
from capture.hooks.interceptor import Arguments
from capture.hooks.modes import outside_of_modes
from capture.hooks.modules import CallSite, matches
from capture.hooks.phases import RECOMPUTE
from capture.recording.call_builder import why_never_stored, why_not_copied
from capture.recording.context import RecordingContext
from capture.recording.sampling import SamplePlace
from capture.storage.capture_record import CaptureRecord


@dataclass(eq=False, slots=True)
class SimilarCalls:
    """Calls that are counted together and have the same place in the sample."""

    count: CallCount
    place: SamplePlace | None
    """Place in the sample; None if the calls must not be stored."""
    refused_step: int = -1
    """Step in which the sampler last refused one of the calls."""
    refused_at: int = -1
    """Value of the sampler's `changes` at that refusal."""


class SeenCalls:
    """All calls of a recording, stored or not.

    Args:
        lock: lock that is held while the first call of a new group is inspected.
    """

    def __init__(self, context: RecordingContext, lock: threading.RLock) -> None:
        self.census = Census()
        self.groups: dict[tuple[object, ...], SimilarCalls] = {}
        """Groups of calls, by properties that can be read quickly from a call."""
        self._places: dict[CallCount, SamplePlace | None] = {}
        self._context = context
        self._lock = lock
        self._latest: tuple[int, Tensor | None, Tensor | None] = (-1, None, None)
        """Step and lengths, as tensors, of the latest batch of an inference engine."""
        self._batches: dict[int | None, Batch | None] = {}
        """The latest batch, by the window of the layer."""
        self._visits: dict[str, list[int]] = {}
        """Forward index of each module's latest call, and the call's position in this pass."""

    def visit(self, site: CallSite) -> None:
        """Count a call of a module in its forward pass; the count matches calls between ranks."""
        latest = self._visits.setdefault(site.module, [-1, 0])
        latest[1] = latest[1] + 1 if latest[0] == site.forward_index else 0
        latest[0] = site.forward_index

    def position(self, site: CallSite) -> int:
        """Return the position of a module's latest call in its forward pass, from 0."""
        return self._visits[site.module][1]

    def batch(self, site: CallSite, arguments: Arguments) -> Batch | None:
        """Return the lengths of an inference engine's batch; None for other calls.

        The layers of a step pass the same tensors, so only one of them waits for the GPU.
        """
        if not is_batch(arguments):
            return None
        with self._lock:
            step, starts, lengths = self._latest
            is_same = starts is arguments.cu_seqlens_q and lengths is arguments.seqused_k
            if not (is_same and step == site.step):
                self._latest = site.step, arguments.cu_seqlens_q, arguments.seqused_k
                self._batches = {}
            left, _ = arguments.variant.window
            if left not in self._batches:
                with outside_of_modes():
                    is_unreadable = why_not_copied(arguments)
                    self._batches[left] = None if is_unreadable else Batch.of(arguments)
            return self._batches[left]

    def find(
        self,
        like: tuple[object, ...] | None,
        site: CallSite,
        arguments: Arguments,
        dtype: torch.dtype | None,
    ) -> SimilarCalls:
        """Return the group of a call whose properties are new.

        Args:
            like: key of the group in `groups`; None if the call's properties cannot be compared.
            dtype: dtype that autocast casts the arguments to.
        """
        if not arguments.refusal and (reason := why_never_stored(arguments.query)):
            arguments = arguments._replace(refusal=reason)
        with self._lock:
            with outside_of_modes():
                count = self.census.count_of(site, arguments, dtype)
            if count not in self._places:
                self._places[count] = self._place(site, count)
            found = SimilarCalls(count, self._places[count])
            # Keys with nested tensors, NaN or tensors as options would never be found again.
            is_unequal = count.signature.scale is math.nan or arguments.query.is_nested
            if like and not is_unequal and not any(isinstance(part, Tensor) for part in like):
                with contextlib.suppress(TypeError):  # symbolic sizes have no hash
                    found = self.groups.setdefault(like, found)
            return found

    def _place(self, site: CallSite, count: CallCount) -> SamplePlace | None:
        """Return the place of these calls in the sample; None if they must not be stored."""
        capture = self._context.capture
        if count.signature.refusal or not is_selected(capture, site.module, site.phase):
            return None
        return self._context.sampler.place((site.phase, *count.signature.stratum), site.module)


def is_selected(capture: CaptureRecord, module: str, phase: str) -> bool:
    """Return whether the user selected the calls of a module in a phase."""
    if not module or phase == RECOMPUTE or capture.phase not in ("", phase):
        return False
    return matches(module, capture.modules)
