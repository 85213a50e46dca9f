"""Counts every attention call of a running model, and stores the calls that the sampler selects."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable

import torch
from torch import Tensor

from capture.call.batch import Batch
from capture.errors import reason_of, reraise_from_signal_handler
from capture.hooks.autocast import autocast_dtype, cast, is_any_enabled
from capture.hooks.first_nonfinite import FirstNonfinite
from capture.hooks.interceptor import TORCH_SDPA, Arguments, Observer, bind
from capture.hooks.modes import outside_of_modes
from capture.hooks.modules import CallSite
from capture.recording.call_builder import has_symbolic_sizes, is_transformed
from capture.recording.context import RecordingContext
from capture.recording.kept_calls import KeptCalls
from capture.recording.seen_calls import SeenCalls, SimilarCalls

MOST_SEARCHED = 256
"""Largest number of calls searched for NaN; on a GPU, the model waits for each search."""


class CallRecorder:
    """Receiver of every attention call of the model, which reports problems without raising.

    Args:
        mark: function to call before and after each attention call, and after the recorder's work.
        nonfinite: receiver of the calls' tensors.
        tell: function that receives a sentence about each problem, from any thread.
    """

    def __init__(
        self,
        context: RecordingContext,
        mark: Callable[[], None],
        nonfinite: FirstNonfinite,
        tell: Callable[[str], None],
    ) -> None:
        self.is_closed = True
        """True before the recording begins and after its end."""
        self.lock = threading.RLock()
        self.seen = SeenCalls(context, self.lock)
        self.kept = KeptCalls(context, self.seen, tell)
        self.mark = mark
        self._context, self._nonfinite, self._tell = context, nonfinite, tell
        self._next_index = itertools.count().__next__
        self._searched = 0
        """Number of calls that were searched for NaN and infinity."""

    def observer(self) -> Observer:
        """Return a function that counts each SDPA call, and stores the calls that are selected.

        The function runs at every call, so most calls cost only one look-up in a dictionary. These
        calls need no lock, because the GIL is not released within `+= 1`, and because a call that
        the sampler refused stays refused until the sampler changes.
        """
        groups, tracker = self.seen.groups, self._context.tracker
        sampler, next_index = self._context.sampler, self._next_index
        count_visit = self.seen.visit if self._context.rank is not None else None
        is_tracing, nonfinite = torch._C._is_tracing, self._nonfinite

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
            if self.is_closed:
                return
            # While torch.jit or torch.fx traces, our work would become part of the trace.
            if is_tracing() or not isinstance(output, Tensor):
                self._context.counts.traced += 1
                return
            try:
                site = tracker.site
                module, step, phase, _ = site
                if nonfinite.is_watching:
                    nonfinite.attention(site, query, key, value, attn_mask, output)
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
                        type(query),
                        is_transformed(query),
                    )
                    group = groups.get(like)
                except (RuntimeError, TypeError):
                    like = group = None  # some tensors have no comparable shape
                if group is None:
                    if has_symbolic_sizes(query, key, value):
                        self._context.counts.traced += 1
                        return
                elif group.place is None or (
                    group.refused_step == step
                    and group.refused_at == sampler.changes
                    and not self._seeks_nonfinite
                ):
                    # The fast path neither binds the arguments nor calls the sampler.
                    next_index()
                    group.count.calls += 1
                    if step > group.count.last_step:
                        group.count.last_step = step
                    if count_visit is not None:
                        count_visit(site)
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
                if group is None:
                    group = self.seen.find(like, site, arguments, dtype)
                self._count_and_offer(group, site, arguments, dtype, output, sdpa)
            except Exception as error:
                reraise_from_signal_handler(error)
                self._tell(f"an attention call could not be recorded: {reason_of(error)}")

        return observe

    def handle(
        self, arguments: Arguments, proceed: Callable[[], Tensor], function: Callable[..., Tensor]
    ) -> Tensor:
        """Count a call from an entry point other than SDPA, and store it if selected."""
        self.mark()
        try:
            output = proceed()
        finally:
            self.mark()
        try:
            return self._record(arguments, output, function)
        finally:
            self.mark()

    def _record(
        self, arguments: Arguments, output: Tensor, function: Callable[..., Tensor]
    ) -> Tensor:
        if self.is_closed:
            return output
        if torch._C._is_tracing() or not isinstance(output, Tensor):
            self._context.counts.traced += 1
            return output
        try:
            if has_symbolic_sizes(*arguments[:3]):
                self._context.counts.traced += 1
                return output
            site = self._context.tracker.site
            mask, table = arguments.attn_mask, arguments.page_table
            if self._nonfinite.is_watching:
                is_padded = arguments.seqused_k is not None
                self._nonfinite.attention(site, *arguments[:4], output=output, is_padded=is_padded)
            packed = arguments.cu_seqlens_q
            like: tuple[object, ...] = (
                site.module,
                site.phase,
                *(tensor.shape for tensor in arguments[:3]),
                arguments.query.dtype,
                None if mask is None else (mask.shape, mask.dtype),
                None if packed is None else packed.shape,
                None if table is None else table.shape,
                arguments.sinks is None,
                arguments.seqused_k is None,
                arguments.key_scale is None,
                arguments[5:8],
                *arguments[-6:],
                type(arguments.query),
                is_transformed(arguments.query),
            )
            batch = self.seen.batch(site, arguments)
            group = self.seen.groups.get(like) or self.seen.find(like, site, arguments, None)
            self._count_and_offer(group, site, arguments, None, output, function, batch)
        except Exception as error:
            reraise_from_signal_handler(error)
            self._tell(f"an attention call could not be recorded: {reason_of(error)}")
        return output

    def _count_and_offer(
        self,
        group: SimilarCalls,
        site: CallSite,
        arguments: Arguments,
        dtype: torch.dtype | None,
        output: Tensor,
        function: Callable[..., Tensor],
        batch: Batch | None = None,
    ) -> None:
        """Count a call that autocast casts to `dtype`, and store it if the sampler wants it."""
        index, sampler = self._next_index(), self._context.sampler
        group.count.calls += 1
        if batch is not None:
            self.seen.census.add_batch(site.phase, group.count, batch)
        group.count.last_step = max(group.count.last_step, site.step)
        if self._context.rank is not None:
            self.seen.visit(site)
        if group.place is None:
            return
        # The lock is held until the copies are queued, so that files change in decision order.
        with self.lock:
            changes = sampler.changes
            size = None if batch is None else batch.size
            seeks, is_wanted = self._seeks_nonfinite, sampler.wants(group.place, site.step, size)
            self._searched += seeks
            if not is_wanted:
                group.refused_step, group.refused_at = site.step, changes
            if (seeks or is_wanted) and not self.is_closed:
                with outside_of_modes():
                    given = cast(arguments, dtype)
                    self.kept.store(
                        index, site, group, given, output, function, seeks, is_wanted, size
                    )

    @property
    def _seeks_nonfinite(self) -> bool:
        """True from the first NaN in the run until a call with NaN or infinity is kept."""
        is_sought = self._nonfinite.has_nan and not self._context.sampler.has_nonfinite
        return is_sought and self._searched < MOST_SEARCHED
