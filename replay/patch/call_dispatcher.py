"""Runs kernels on a model's attention calls; checks every output, and each form of call once."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from attention_replay.errors import Error
from capture.call.attention_call import AttentionCall
from capture.call.attention_variant import beyond_arguments, output_dtype
from capture.hooks.autocast import autocast_dtype, cast, is_any_enabled
from capture.hooks.entry_points.wrapper import FollowedCall
from capture.hooks.interceptor import Arguments, answer
from replay.isolation.output_form import malformed
from replay.kernels.failures import classify
from replay.kernels.registry import Kernel
from replay.patch.call_counts import Swap
from replay.patch.custom_op import costs_reshape, laid_out
from replay.patch.denoising_steps import current_step
from replay.patch.kernel_backward import (
    in_kernel_backward,
    mark_backward,
    needed_gradients,
    no_backward,
)
from replay.patch.planned_modules import NOT_PLANNED, key_length
from replay.plan.key_lengths import kernel_for
from replay.plan.step_ranges import KernelsByStep

Around = Callable[[], contextlib.AbstractContextManager[object]]
"""Function that returns a context manager to enter for the kernel, or the model's own attention, of
each call."""

MOST_FORMS = 1024
"""Maximum number of forms of calls for which the kernel's support is cached."""

SDPA_ARGUMENTS = Arguments._fields[:8]


class KernelOutputError(Error):
    """Output of a kernel that does not fit the call; the message states why."""


@dataclass(slots=True)
class _CallForm:
    """Facts about the calls of one form, which share shapes, strides, dtypes and options."""

    refusal: str | None
    """Reason why the kernel cannot run these calls; None if it can."""
    mask: Callable[[], Tensor | None] = lambda: None
    """Weak reference to the mask, whose values may matter."""
    output: object = None
    """Shape, strides, dtype and device of the last output that was checked."""
    costs_reshape: bool = False
    """True if the model's own reshape copies this output."""


class CallDispatcher:
    """Runs kernels on calls and counts the outcomes.

    Args:
        swap: counts to update.
        kernels: the kernels by name.
        choose: returns the name of a call's kernel, or another text for the model's own attention.
        around: a context manager to enter for the kernel of each call.
        thread: the only thread whose calls may have a kernel; by default, all threads.
        by_step: kernels that depend on the step, by the text that `choose` returns for them.
    """

    def __init__(
        self,
        swap: Swap,
        kernels: Mapping[str, Kernel],
        choose: Callable[[Arguments], str | None],
        around: Around,
        thread: int | None = None,
        by_step: Mapping[str, KernelsByStep] | None = None,
    ) -> None:
        self._thread = thread
        self._by_step = by_step or {}
        self._swap = swap
        self._around = None if around is contextlib.nullcontext else around
        self._kernels = kernels
        self._attentions = {name: kernel.attention for name, kernel in kernels.items()}
        self._forms: dict[object, _CallForm] = {}
        self._without_backward: dict[object, str | None] = {}
        self._choose = choose
        self._own = F.scaled_dot_product_attention
        self._counting = threading.Lock()

    def handle(
        self, arguments: Arguments, proceed: Callable[[], Tensor], sdpa: Callable[..., Tensor]
    ) -> Tensor:
        """Handle a call that is not compiled."""
        if in_kernel_backward():
            return proceed()
        name = self._name(arguments)
        if is_any_enabled():  # a kernel does not cast its inputs under autocast, as SDPA would
            arguments = cast(arguments, autocast_dtype(arguments.query))
        output, form = self._run(name, arguments, proceed)
        if form.costs_reshape:
            self._count(name, arguments.entry_point, copies=1)
        return output

    def answer(self, kernel: str, arguments: Arguments) -> Tensor:
        """Handle a call from a compiled graph."""
        name = self._name(arguments, kernel)

        def handle(
            arguments: Arguments, proceed: Callable[[], Tensor], sdpa: Callable[..., Tensor]
        ) -> Tensor:
            output, is_copy = laid_out(self._run(name, arguments, proceed)[0], arguments.query)
            if is_copy:
                self._count(name, arguments.entry_point, copies=1)
            return output

        def proceed() -> Tensor:
            return self._own(**_keywords(arguments))

        output = answer(handle, arguments, proceed, self._own)
        return laid_out(output, arguments.query)[0]

    def _name(self, arguments: Arguments, in_graph: str = "") -> str:
        if self._thread not in (None, threading.get_ident()):
            return NOT_PLANNED
        name = in_graph or self._choose(arguments) or NOT_PLANNED
        by_step = self._by_step.get(name)
        return name if by_step is None else self._name_at_step(by_step, arguments)

    def _name_at_step(self, by_step: KernelsByStep, arguments: Arguments) -> str:
        step = current_step(on_gpu=arguments.query.is_cuda)
        kernels = by_step.at(step)
        if not kernels:
            with self._counting:
                self._swap.count_step(step)
            return NOT_PLANNED
        return kernel_for(key_length(arguments), kernels) if len(kernels) > 1 else kernels[0][1]

    def traced(self, function: str) -> None:
        with self._counting:
            self._swap.in_graphs[function] += 1

    def refuse(self, kernel: str, reason: str) -> None:
        self._count(kernel or NOT_PLANNED, "sdpa", fallback=reason)

    def _run(
        self, name: str, arguments: Arguments, proceed: Callable[[], Tensor]
    ) -> tuple[Tensor, _CallForm]:
        """Return the output, and the facts about calls of this form."""
        form = self._form(name, arguments)
        refusal = form.refusal
        if refusal is None and isinstance(proceed, FollowedCall):
            refusal = proceed.refusal()
        if refusal is None:
            try:
                output = self._timed(self._attentions[name], _keywords(arguments))
            except NotImplementedError as error:
                refusal = form.refusal = classify(error).reason
        if refusal is not None:
            self._count(name, arguments.entry_point, fallback=refusal)
            return self._timed(proceed, {}), form
        output_form: object = None
        if isinstance(output, Tensor):
            output_form = (output.shape, output.stride(), output.dtype, output.device)
        if output_form is None or output_form != form.output:
            if not _fits(output, arguments):
                wrong = malformed(output, AttentionCall(**arguments.fields()))
                raise KernelOutputError(f"{name} {wrong or 'returned no output of this call'}")
            form.output, form.costs_reshape = output_form, costs_reshape(output, arguments.query)
        if output.requires_grad:
            mark_backward(output, arguments[:3])
        self._count_hit(name, arguments)
        return output, form

    def _timed(self, function: Callable[..., Tensor], keywords: dict[str, Any]) -> Tensor:
        if self._around is None:
            return function(**keywords)
        with self._around():
            return function(**keywords)

    def _form(self, name: str, arguments: Arguments) -> _CallForm:
        """Return the facts about a call; cached for the same mask, and not with other tensors such
        as lengths, because their values matter."""
        kernel = self._kernels.get(name)
        if kernel is None:
            return _CallForm(self._swap.outside)
        if arguments.returns:
            return _CallForm(f"the model asks for {arguments.returns}")
        if arguments.refusal:
            return _CallForm(arguments.refusal)
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa = arguments[:8]
        if query.ndim != 4:
            return _CallForm("not four-dimensional")
        needed = needed_gradients(arguments.fields()) if torch.is_grad_enabled() else ()
        if arguments.features or (attn_mask is not None and attn_mask.is_inference()):
            return _CallForm(self._refusal(name, arguments, needed))
        # The signature is written out for speed, because every call passes here.
        signature = (
            *(name, needed, dropout_p, is_causal, scale, enable_gqa, query.device),
            *(query.shape, query.stride(), query.dtype),
            *(key.shape, key.stride(), key.dtype),
            *(value.shape, value.stride(), value.dtype),
            *((id(attn_mask), attn_mask._version) if attn_mask is not None else ()),
        )
        form = self._forms.get(signature)
        # Another mask may have the number of one that is gone.
        if form is None or (attn_mask is not None and form.mask() is not attn_mask):
            if len(self._forms) >= MOST_FORMS:  # a decoder has a new shape for every token
                self._forms.clear()
            form = _CallForm(self._refusal(name, arguments, needed))
            if attn_mask is not None:
                form.mask = weakref.ref(attn_mask)
            self._forms[signature] = form
        return form

    def _refusal(self, name: str, arguments: Arguments, needed: tuple[str, ...]) -> str | None:
        """Return why a kernel cannot run a call, whose gradients of some tensors are needed.

        Whether gradients pass is tried once for calls that differ in batch and lengths only.
        """
        refusal = self._kernels[name].refuses(AttentionCall(**arguments.fields()))
        if refusal is not None or not needed:
            return refusal
        query, key, value, attn_mask, dropout_p, is_causal, _, enable_gqa = arguments[:8]
        kind = (
            *(name, needed, arguments.features, query.device, query.dtype),
            *(query.shape[1::2], key.shape[1], value.shape[3], dropout_p > 0, is_causal),
            *(enable_gqa, None if attn_mask is None else attn_mask.dtype),
        )
        if kind not in self._without_backward:
            found = no_backward(self._attentions[name], _keywords(arguments))
            self._without_backward[kind] = found
        return self._without_backward[kind]

    def _count_hit(self, name: str, arguments: Arguments) -> None:
        swap = self._swap
        with self._counting:
            if swap.planned_lengths:
                swap.count_length(key_length(arguments))
            swap.entry_points[arguments.entry_point].hits += 1
            swap.kernels[name].hits += 1

    def _count(self, name: str, entry_point: str, *, fallback: str = "", copies: int = 0) -> None:
        swap = self._swap
        with self._counting:
            tallies = [swap.entry_points[entry_point]]
            if name in swap.kernels:
                tallies.append(swap.kernels[name])
            elif fallback:
                swap.not_planned += 1
            for tally in tallies:
                tally.layout_copies += copies
                if fallback:
                    tally.fallbacks[fallback] += 1


def _fits(output: object, arguments: Arguments) -> bool:
    """Return True if an output has the expected form; the model may not notice a wrong form."""
    query, key, value = arguments[:3]
    if not isinstance(output, Tensor) or output.ndim != 4:
        return False
    if output.shape[2:] != (query.shape[2], value.shape[3]):
        return False
    if (output.dtype, output.device) != (output_dtype(arguments), query.device):
        return False
    # With broadcast sizes or paged keys, the query alone does not determine the first two sizes.
    same_batch = query.shape[0] == key.shape[0]
    same_heads = arguments.enable_gqa or query.shape[1] == key.shape[1]
    return output.shape[:2] == query.shape[:2] or not (same_batch and same_heads)


def _keywords(arguments: Arguments) -> dict[str, Any]:
    """Convert to keywords; omit unused options, because not every function accepts them."""
    keywords = dict(zip(SDPA_ARGUMENTS, arguments, strict=False))
    if not arguments.enable_gqa:
        del keywords["enable_gqa"]
    if arguments.entry_point != "sdpa":
        keywords.update(beyond_arguments(arguments))
    return keywords
