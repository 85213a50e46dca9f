"""The wrapper that every road puts around the functions it follows."""

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
from capture.hooks.signals import is_meant_for_program


@dataclass(frozen=True)
class OutputLayout:
    """How what a function returns becomes SDPA's output (B, Hq, Sq, Dv), and the reverse."""

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
"""What transformers' attention functions return; no kernel returns the weights."""

Translate = Callable[..., "tuple[Arguments, OutputLayout] | None"]
"""The arguments of one call in SDPA's terms; None if the road leaves it to another."""


def plainest(arguments: Arguments) -> Arguments:
    """The same call without options that change nothing, so that more kernels know it.

    Libraries pass a decode's one query as causal and aligned bottom right, which masks nothing, and
    give causal calls a window to the right.
    """
    variant, (left, right) = arguments.variant, arguments.variant.window
    q_len, kv_len = arguments.query.shape[-2], arguments.key.shape[-2]
    if arguments.page_table is not None:
        kv_len *= arguments.page_table.shape[-1]
    is_causal, alone = arguments.is_causal, arguments.cu_seqlens_q is None
    if alone and q_len == 1 and variant.bottom_right:  # its diagonal is the last key
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


_told: list[Callable[[str], None]] = []


@contextlib.contextmanager
def tracing_reported(traced: Callable[[str], None]) -> Iterator[None]:
    """Tell `traced` the name of each followed function that becomes part of a compiled graph."""
    _told.append(traced)
    try:
        yield
    finally:
        _told.remove(traced)


@constant_in_graphs
def _tell(name: str) -> None:
    if not is_inside():  # a kernel may compile what it runs
        for traced in _told:
            traced(name)


def _converted(form: OutputLayout, result: Any) -> Any:
    """What a function returned as SDPA's output; None where it has another form than is known."""
    try:
        return form.to_sdpa(result)
    except Exception as error:
        if is_meant_for_program(error):
            raise
        return None


def wrapped(
    function: Callable[..., Any], translate: Translate, handler: Handler
) -> Callable[..., Any]:
    """`function`, whose calls pass through `handler`.

    A call that cannot be said in SDPA's terms (`Arguments.refusal`) runs as it is. It is handed to
    the handler afterwards, to be counted, unless a call inside of it was.
    """

    name = getattr(function, "__name__", type(function).__name__)

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        # Nothing below can be traced.
        if torch.compiler.is_compiling():
            _tell(name)
            return function(*args, **kwargs)
        if is_inside():
            return function(*args, **kwargs)
        try:
            translated = translate(*args, **kwargs)
        except Exception as error:
            if is_meant_for_program(error):
                raise
            translated = None  # the function raises its own error, or knows more than we do
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
    """Have the calls of a function pass through `handler` until the exit, whoever holds it."""
    return replaced(function, lambda original: wrapped(original, translate, handler))
