"""Wrapper that every entry point puts around its functions."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from capture.call.attention_variant import PLAIN
from capture.errors import reason_of
from capture.hooks.autocast import autocast_dtype
from capture.hooks.entry_points.functions import replaced
from capture.hooks.entry_points.return_form import (
    MOST_FUNCTIONS,
    OUTPUT,
    OUTPUT_AND_WEIGHTS,
    Key,
    ReturnForm,
    form_of,
    forms_of,
    key_of,
)
from capture.hooks.gradients import CallGradients, begin_call, following
from capture.hooks.graph_constant import constant_in_graphs
from capture.hooks.interceptor import (
    Arguments,
    Handler,
    answer,
    calls_handled,
    is_inside,
    refused_call,
)


@dataclass(frozen=True)
class OutputLayout:
    """Conversions between a function's output and SDPA's output (B, Hq, Sq, Dv)."""

    to_sdpa: Callable[[Tensor], Tensor]
    from_sdpa: Callable[[Tensor], Tensor]
    expected: ReturnForm = OUTPUT
    """Form of the result of a function that cannot run, or that is not run to learn its form."""
    is_learned: bool = True
    """True if one run of the function shows what it returns, False if its arguments tell."""


def _to_bhsd(output: Tensor) -> Tensor:
    return output.transpose(1, 2) if output.ndim == 4 else output


BHSD = OutputLayout(lambda output: output, lambda output: output)
BSHD = OutputLayout(_to_bhsd, lambda output: output.transpose(1, 2))
THD = OutputLayout(
    lambda output: output.transpose(0, 1)[None], lambda output: output[0].transpose(0, 1)
)
BSHD_AND_WEIGHTS = OutputLayout(
    _to_bhsd, lambda output: output.transpose(1, 2).contiguous(), OUTPUT_AND_WEIGHTS
)
"""Layout of transformers' attention functions. The weights are None, as no kernel returns them."""

Translate = Callable[..., "tuple[Arguments, OutputLayout] | None"]
"""Function that expresses a call with SDPA's arguments, or returns None to ignore the call."""


def int_or_none(value: Any) -> int | None:
    """Return an integer unchanged, and None for anything else, such as a tensor."""
    return value if isinstance(value, int) else None


def plainest(arguments: Arguments) -> Arguments:
    """Return the same call without options that change nothing, so that more kernels support it.

    For example, libraries mark a decoding step with one query as causal and aligned bottom right,
    which masks nothing, and they pass a right window with causal calls.
    """
    variant, (left, right) = arguments.variant, arguments.variant.window
    q_len, kv_len = arguments.query.shape[-2], arguments.key.shape[-2]
    if arguments.page_table is not None:
        kv_len *= arguments.page_table.shape[-1]
    is_causal, alone = arguments.is_causal, arguments.cu_seqlens_q is None
    if alone and q_len == 1 and variant.bottom_right:  # the query is aligned with the last key
        is_causal, right = False, None
    if is_causal and right is not None and right >= 0:
        right = None
    if alone and left is not None and left >= max(q_len, kv_len):
        left = None
    unequal = not alone or arguments.seqused_k is not None or q_len != kv_len
    follows = is_causal or (left, right) != (None, None)
    variant = replace(
        variant, window=(left, right), bottom_right=variant.bottom_right and unequal and follows
    )
    return arguments._replace(is_causal=is_causal, variant=variant if variant != PLAIN else PLAIN)


_trace_reports: list[Callable[[str], None]] = []


@contextlib.contextmanager
def tracing_reported(traced: Callable[[str], None]) -> Iterator[None]:
    """Call `traced` with the name of each wrapped function that is traced into a graph."""
    _trace_reports.append(traced)
    try:
        yield
    finally:
        _trace_reports.remove(traced)


@constant_in_graphs
def _tell(name: str) -> None:
    if not is_inside():  # inside a handled call, a kernel may compile its own code
        for traced in _trace_reports:
            traced(name)


def _not_understood(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception
) -> tuple[Arguments, OutputLayout] | None:
    """Return a call to be counted, as no translation of it is known; None without three tensors.

    If the arguments are wrong, the function raises its own error and nothing is counted.
    """
    tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)][:3]
    if len(tensors) < 3 or min(each.ndim for each in tensors) < 3:
        return None
    query, key, value = tensors
    sdpas = (query, key, value, None, 0.0, False, None, False)
    reason = f"arguments of {name} could not be read: {reason_of(error)}"
    return Arguments(*sdpas, entry_point=name, backend=name, refusal=reason), BHSD


def _converted(layout: OutputLayout, result: Any) -> Any:
    """Convert a function's result to SDPA's output; None if the result has an unknown layout."""
    output = result[0] if isinstance(result, (tuple, list)) and result else result
    try:
        return layout.to_sdpa(output)
    except Exception:
        return None


@dataclass(slots=True, eq=False)
class FollowedCall:
    """Call of a function. Calling this object runs the function, once; returns SDPA's output.

    A handler that replaces the function asks for the `refusal` first.
    """

    name: str
    run: Callable[[], Any]
    given: tuple[tuple[Any, ...], dict[str, Any]]
    arguments: Arguments
    layout: OutputLayout
    forms: dict[Key, ReturnForm]
    """Forms of the function's results so far, which this call may add to."""
    form: ReturnForm
    own: tuple[Any, Any] | None = None
    """The function's result, and its output in SDPA's layout; None if the function did not run."""
    gradients: CallGradients | None = None

    def __call__(self) -> Any:
        if self.own is None:
            result = self.run()
            if self.gradients is not None:
                self.gradients.returned(result, lambda: self.arguments, self.layout.to_sdpa)
            self.own = result, _converted(self.layout, result)
        return self.own[1]

    def refusal(self) -> str | None:
        """Return why no kernel can replace the function; None if one can.

        Runs the function at the first call of its kind, to learn the form of its result.
        """
        if not self.layout.is_learned:
            return None
        key = (autocast_dtype(self.arguments.query), *key_of(*self.given))
        if key not in self.forms:
            learned = self.form
            with contextlib.suppress(Exception):  # it may not run on this machine
                output = self()
                assert self.own is not None
                learned = form_of(self.own[0], output, self.arguments, self.form)
            if len(self.forms) >= MOST_FUNCTIONS:
                self.forms.clear()
            self.forms[key] = learned
        self.form = self.forms[key]
        if self.form.refusal:
            return f"{self.name} {self.form.refusal}"
        self.own = None  # frees the memory before the kernel runs
        return None

    def result(self, output: Tensor) -> Any:
        """Return what the function returns if this is its output in SDPA's layout."""
        if self.own is not None and output is self.own[1]:
            return self.own[0]
        return self.form.made_of(self.layout.from_sdpa(output))


def wrapped(
    function: Callable[..., Any], translate: Translate, handler: Handler
) -> Callable[..., Any]:
    """Return a function whose calls pass through `handler`.

    A call that SDPA's arguments cannot express (`Arguments.refusal`) runs unchanged. Afterwards the
    handler counts the call, unless another call inside it was handled.
    """

    name = getattr(function, "__name__", type(function).__name__)
    forms = forms_of(function)

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        # Checked first, because the code below cannot be traced.
        if torch.compiler.is_compiling():
            _tell(name)
            return function(*args, **kwargs)
        if is_inside():
            return function(*args, **kwargs)
        if not following:
            return followed(args, kwargs, None)
        args, kwargs, gradients = begin_call(args, kwargs)
        try:
            return followed(args, kwargs, gradients)
        finally:
            if gradients is not None:
                gradients.release()

    def followed(
        args: tuple[Any, ...], kwargs: dict[str, Any], gradients: CallGradients | None
    ) -> Any:
        try:
            translated = translate(*args, **kwargs)
        except Exception as error:
            translated = _not_understood(name, args, kwargs, error)
        if translated is None:
            return function(*args, **kwargs)
        arguments, layout = plainest(translated[0]), translated[1]
        if arguments.refusal:
            before = calls_handled()
            with refused_call():
                result = function(*args, **kwargs)
            output = _converted(layout, result)
            if calls_handled() == before and isinstance(output, Tensor):
                answer(handler, arguments, lambda: output, function)
            return result
        run = functools.partial(function, *args, **kwargs)
        given = (args, kwargs)
        call = FollowedCall(name, run, given, arguments, layout, forms, layout.expected)
        call.gradients = gradients
        return call.result(answer(handler, arguments, call, function))

    return wrapper


def wrapped_everywhere(
    function: Callable[..., Any], translate: Translate, handler: Handler
) -> contextlib.AbstractContextManager[None]:
    """Pass the calls of a function through `handler` until the exit, through all references."""
    return replaced(function, lambda original: wrapped(original, translate, handler))
