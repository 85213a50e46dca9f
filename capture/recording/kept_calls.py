"""Stores and counts the calls that a recording's sampler selects."""

from __future__ import annotations

import errno
import functools
from collections import deque
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from capture.call.attention_call import Origin
from capture.call.batch import BatchSize
from capture.call.nonfinite import nonfinite_tensors
from capture.errors import InvalidCall, reason_of, reraise_from_signal_handler
from capture.hooks.backends import disabled_backends, function_or_backend
from capture.hooks.census import CallCount
from capture.hooks.gradients import current_gradients
from capture.hooks.interceptor import Arguments
from capture.hooks.modules import CallSite
from capture.recording.call_builder import as_call, why_not_copied
from capture.recording.context import RecordingContext
from capture.recording.copies import stored_bytes
from capture.recording.difficulty import with_difficulty
from capture.recording.gradient_form import GradientForm, gradient_bytes
from capture.recording.heads import kv_heads_of, pick
from capture.recording.parts import WHOLE, RankPart, as_local, is_distributed, of_weights
from capture.recording.sampling import OfferedCall
from capture.recording.seen_calls import SeenCalls, SimilarCalls
from capture.recording.writer import WaitingCall, Writer
from capture.storage.header import CallHeader, dtype_name, stored_tensors
from capture.text.counted import counted


class KeptCalls:
    """Calls of a recording that are stored, or are in memory and will be stored.

    Args:
        tell: function that receives a sentence about each problem, from any thread.
    """

    def __init__(
        self, context: RecordingContext, seen: SeenCalls, tell: Callable[[str], None]
    ) -> None:
        self.writer: Writer | None = None
        """Writer of the kept calls, set before the first call."""
        self._seen, self._tell = seen, tell
        self._context, self._counts = context, context.counts
        self._kept: dict[int, tuple[CallSite, CallCount, int]] = {}
        """For each kept call, by index: its site, its count in the census, and its bytes."""
        self._without_gradients: set[int] = set()
        """Indices of kept calls whose gradients have not come."""
        self._failed: deque[tuple[int, Exception]] = deque()
        """Calls that the writer's thread could not write, by index; appended without a lock."""

    def __len__(self) -> int:
        return len(self._kept)

    def store(
        self,
        index: int,
        site: CallSite,
        group: SimilarCalls,
        arguments: Arguments,
        result: Tensor,
        sdpa: Callable[..., Tensor],
        seeks_nonfinite: bool = False,
        is_wanted: bool = True,
        size: BatchSize | None = None,
    ) -> None:
        """Store a call that the sampler wants, if the call has values and fits the limits.

        Args:
            seeks_nonfinite: True to look for NaN and infinity, and store a call that has some.
            is_wanted: False to store the call only if it has NaN or infinity.
            size: figures of an inference engine's batch.
        """
        writer, counts, context = self.writer, self._counts, self._context
        assert writer is not None
        assert group.place is not None
        self._forget_failed(writer)
        part = context.part
        if is_distributed(arguments):
            found = as_local(arguments, result)
            if found is None:
                self._tell(
                    f"{site.module} splits its tensors by more than batch and heads: its calls are "
                    "counted and not stored"
                )
                self._seen.census.refuse(site, group.count, "split by more than batch and heads")
                return
            arguments, result, part = found
        if reason := why_not_copied(arguments):
            self._seen.census.refuse(site, group.count, reason)
            return
        if part is None:
            module = None if context.rank is None else context.tracker.module
            part = WHOLE if module is None else of_weights(module, *arguments[:2])
        if context.heads is not None:
            part = WHOLE  # a part that lacks heads cannot be joined with other parts
        output = result if context.keeps_output else None
        try:
            call = as_call(arguments, output, self._origin(index, site, arguments, sdpa, part))
        except InvalidCall as error:
            context.capture.add_invalid(error)
            self._seen.census.refuse(site, group.count, _INVALID)
            return
        form = GradientForm.of(call, result)
        if arguments.dropped:
            context.capture.add_invalid(InvalidCall(arguments.dropped, site.module, site.step))
        if context.heads is not None:
            kv_heads = kv_heads_of(context.heads, call.shape.q_heads, call.shape.kv_heads)
            if kv_heads is None:
                reason = "without the heads {} with equally many for each key/value head"
                self._seen.census.refuse(site, group.count, reason.format(context.capture.heads))
                return
            call = pick(call, context.heads, kv_heads)
            form = replace(form, heads=(context.heads, kv_heads))
        if context.sampler.by_difficulty:
            call = with_difficulty(call)
        if seeks_nonfinite or context.sampler.by_difficulty:
            nonfinite = nonfinite_tensors({**call.tensors(), "output": result})
            if not (nonfinite or is_wanted):
                return
            call = replace(call, origin=replace(call.origin, nonfinite=nonfinite))
        tensors, header = stored_tensors(call), CallHeader.of(call)
        nbytes = stored_bytes(tensors)
        if fault := header.fault() or header.excess(nbytes):  # the file could not be loaded
            self._tell(f"a call cannot be stored: {fault}")
            self._seen.census.refuse(site, group.count, fault)
            return
        gradients = current_gradients()
        offered = OfferedCall(
            index,
            group.place,
            site.step,
            nbytes + (0 if gradients is None else gradient_bytes(call)),
            call.origin.difficulty,
            bool(call.origin.nonfinite),
            size,
        )
        drop = context.sampler.offer(offered)
        counts.refused_for_bytes = context.sampler.refused_for_bytes
        if drop is None:
            return
        try:
            copy = writer.copied(tensors)
            self._kept[index] = site, group.count, nbytes
            group.count.kept += 1
            counts.nbytes += nbytes
            waiting = WaitingCall(replace(header, layouts=copy.layouts), copy)
            if context.keeps_gradients:
                self._without_gradients.add(index)
                counts.without_gradients += 1
            for dropped in writer.put(waiting, drop, gradients_may_come=gradients is not None):
                self._forget(dropped)
            if gradients is not None:
                add = functools.partial(self._add_gradients, waiting.header, form)
                gradients.watch(add)
        except Exception as error:
            reraise_from_signal_handler(error)
            self.failed(index, error)

    def _add_gradients(
        self, header: CallHeader, form: GradientForm, gradients: dict[str, Tensor]
    ) -> None:
        """Store the gradients of a kept call; called in the backward pass."""
        writer, index = self.writer, header.origin.call_index
        assert writer is not None
        if index not in self._kept or writer.is_closing:
            return
        found = form.stored(gradients)
        dtypes = {name: dtype_name(tensor.dtype) for name, tensor in found.items()}
        copy = writer.copied(found)
        with_gradients = replace(
            header, dtypes=header.dtypes | dtypes, layouts=header.layouts | copy.layouts
        )
        if writer.complete(index, with_gradients, copy):
            self._without_gradients.discard(index)
            self._counts.without_gradients = len(self._without_gradients)
            kept_site, count, nbytes = self._kept[index]
            self._kept[index] = kept_site, count, nbytes + stored_bytes(found)
            self._counts.nbytes += stored_bytes(found)

    def failed(self, index: int, error: Exception) -> None:
        """Register a call that could not be stored. The writer's threads call this method too.

        Invalid calls are reported at the end, because threads write calls in any order.
        """
        self._failed.append((index, error))
        if not isinstance(error, InvalidCall):
            is_full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
            remedy = ": make room, or choose another directory with `out=`" if is_full else ""
            directory = self._context.target.directory
            self._tell(f"could not store a call in {directory}: {reason_of(error)}{remedy}")

    def give_up(self) -> None:
        """Forget the calls that are not written yet, and report their number as a problem."""
        writer = self.writer
        assert writer is not None
        self._forget_failed(writer)
        for problem in self._context.capture.invalid:
            self._tell(problem)
        given_up = [index for index in self._kept if index not in writer.completed]
        if given_up:
            self._tell(f"dropped {counted(len(given_up), 'call')}, not written yet")
            self._counts.lost += len(given_up)
            for index in given_up:
                self._forget(index)

    def _forget_failed(self, writer: Writer) -> None:
        while self._failed:
            index, error = self._failed.popleft()
            if index in writer.completed:
                continue
            if not isinstance(error, InvalidCall):
                self._counts.lost += 1
            else:
                self._context.capture.add_invalid(error)
                if index in self._kept:
                    site, count, _ = self._kept[index]
                    self._seen.census.refuse(site, count, _INVALID)
            self._forget(index)

    def _forget(self, index: int) -> None:
        if found := self._kept.pop(index, None):
            _, count, nbytes = found
            self._without_gradients.discard(index)
            self._counts.without_gradients = len(self._without_gradients)
            count.kept -= 1
            self._counts.nbytes -= nbytes

    def _origin(
        self,
        index: int,
        site: CallSite,
        arguments: Arguments,
        sdpa: Callable[..., Tensor],
        part: RankPart,
    ) -> Origin:
        device = arguments.query.device
        described = device.type
        if device.type == "cuda":
            described = f"cuda ({torch.cuda.get_device_name(device)})"
        self._context.capture.device = described
        return Origin(
            model=self._context.capture.model,
            weights=self._context.capture.weights,
            module=site.module,
            call_index=index,
            step=site.step,
            forward_index=site.forward_index,
            phase=site.phase,
            device=described,
            seed=self._context.seed,
            rank=self._context.rank,
            entry_point=arguments.entry_point,
            backend=arguments.backend or function_or_backend(arguments, sdpa),
            disabled_backends=disabled_backends(),
            heads=self._context.capture.heads or part.heads,
            split=part.split,
            split_ranks=[*part.ranks],
            call_in_step=0 if self._context.rank is None else self._seen.position(site),
            versions=self._context.capture.versions,
        )


_INVALID = "invalid arguments"
"""Refusal in the census of calls that are the model's bug (`InvalidCall`)."""
