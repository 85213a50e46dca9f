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
from capture.hooks.entry_points.functions import replaced
from capture.hooks.graph_constant import constant_in_graphs
from capture.hooks.interceptor import Arguments, Handler, answer, calls_handled, is_inside


@dataclass(frozen=True)
class OutputLayout:
    """Conversions between a function's result and SDPA's output (B, Hq, Sq, Dv)."""

    to_sdpa: Callable[[Any], Any]
    from_sdpa: Callable[[Tensor], Any]


def _first(result: Any) -> Any:
    return result[0] if isinstance(result, tuple) else result


def _to_bhsd(result: Any) -> Any:
    output = _first(result)
    return output.transpose(1, 2) if isinstance(output, Tensor) and output.ndim == 4 else output


def _packed_to_bhsd(result: Any) -> Any:
    output = _first(result)
    return output.transpose(0, 1)[None] if isinstance(output, Tensor) else output


BHSD = OutputLayout(_first, lambda output: output)
BSHD = OutputLayout(_to_bhsd, lambda output: output.transpose(1, 2))
THD = OutputLayout(_packed_to_bhsd, lambda output: output[0].transpose(0, 1))
BSHD_AND_WEIGHTS = OutputLayout(
    _to_bhsd, lambda output: (output.transpose(1, 2).contiguous(), None)
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


def _converted(form: OutputLayout, result: Any) -> Any:
    """Convert a function's result to SDPA's output; None if the result has an unknown layout."""
    try:
        return form.to_sdpa(result)
    except Exception:
        return None


def wrapped(
    function: Callable[..., Any], translate: Translate, handler: Handler
) -> Callable[..., Any]:
    """Return a function whose calls pass through `handler`.

    A call that SDPA's arguments cannot express (`Arguments.refusal`) runs unchanged. Afterwards the
    handler counts the call, unless another call inside it was handled.
    """

    name = getattr(function, "__name__", type(function).__name__)

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        # Checked first, because the code below cannot be traced.
        if torch.compiler.is_compiling():
            _tell(name)
            return function(*args, **kwargs)
        if is_inside():
            return function(*args, **kwargs)
        try:
            translated = translate(*args, **kwargs)
        except Exception:
            translated = None  # the function raises its own error or has arguments unknown to us
        if translated is None:
            return function(*args, **kwargs)
        arguments, form = plainest(translated[0]), translated[1]
        if arguments.refusal:
            before = calls_handled()
            result = function(*args, **kwargs)
            output = _converted(form, result)
            if calls_handled() == before and isinstance(output, Tensor):
                answer(handler, arguments, lambda: output, function)
            return result
        results: list[tuple[Any, Tensor]] = []

        def proceed() -> Tensor:
            result = function(*args, **kwargs)
            results.append((result, _converted(form, result)))
            return results[0][1]

        output = answer(handler, arguments, proceed, function)
        for result, own in results:
            if output is own:
                return result
        return form.from_sdpa(output)

    return wrapper


def wrapped_everywhere(
    function: Callable[..., Any], translate: Translate, handler: Handler
) -> contextlib.AbstractContextManager[None]:
    """Pass the calls of a function through `handler` until the exit, through all references."""
    return replaced(function, lambda original: wrapped(original, translate, handler))
