"""Intercepts every call of `torch.nn.functional.scaled_dot_product_attention`.

The function is replaced in every loaded module that refers to it: in `torch.nn.functional` itself,
where models look it up at call time, and in modules that ran `from torch.nn.functional import
scaled_dot_product_attention`. `capture.hooks.entry_points` handles attention that does not begin as
a call of SDPA.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from capture.call.attention_variant import PLAIN, AttentionVariant, features
from capture.hooks.gradients import begin_call, following

TORCH_SDPA: Callable[..., Tensor] = F.scaled_dot_product_attention
"""PyTorch's own function, saved at import, before it is replaced."""


class Arguments(NamedTuple):
    """Arguments of an attention call by name: SDPA's arguments, then those of other functions."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None
    dropout_p: float
    is_causal: bool
    scale: float | None
    enable_gqa: bool
    sinks: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    seqused_k: Tensor | None = None
    page_table: Tensor | None = None
    query_scale: Tensor | None = None
    key_scale: Tensor | None = None
    value_scale: Tensor | None = None
    variant: AttentionVariant = PLAIN
    entry_point: str = "sdpa"
    """Entry point that the model called."""
    backend: str = ""
    """Name of the kernel that computed the call; empty for SDPA."""
    refusal: str = ""
    """Reason why the call cannot be an `AttentionCall` and is only counted; usually empty."""
    returns: str = ""
    """Results that the caller requests but no kernel returns, such as weights; usually empty."""
    dropped: str = ""
    """Sentence about an argument of the model that never reaches the kernel; usually empty."""

    @classmethod
    def of(
        cls,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None,
        *,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        **beyond: Any,
    ) -> Arguments:
        """Return another function's arguments; `beyond` has the arguments that SDPA lacks."""
        dropout, scale = float(dropout_p), None if scale is None else float(scale)
        is_grouped = query.shape[1] != key.shape[1]
        sdpas = (query, key, value, attn_mask, dropout, bool(is_causal), scale, is_grouped)
        return cls(*sdpas, **beyond)

    @property
    def features(self) -> tuple[str, ...]:
        """Features beyond SDPA that a kernel must support, as names in `FEATURES`."""
        return features(self)

    def fields(self) -> dict[str, Any]:
        """Return by name the arguments that are also fields of an `AttentionCall`."""
        fields = self._asdict()
        for name in ("entry_point", "backend", "refusal", "returns", "dropped"):
            del fields[name]
        return fields


def bind(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Arguments:
    """Bind arguments to SDPA's signature (`inspect.signature` cannot read the builtin's)."""
    # SDPA also accepts numpy and tensor scalars; the census and headers need plain numbers.
    scale = None if scale is None else float(scale)
    # Three times as fast as calling the class, and every SDPA call runs this line.
    sdpas = (query, key, value, attn_mask, float(dropout_p), is_causal, scale, enable_gqa)
    bound = _tuple(Arguments, sdpas + _BEYOND)
    return bound if attn_mask is None else _without_bias(bound)


def _without_bias(arguments: Arguments) -> Arguments:
    """Replace a `CausalBias`, a mask without values in memory, with `is_causal`."""
    bias = sys.modules.get("torch.nn.attention.bias")  # not imported, since that imports Triton
    mask = arguments.attn_mask
    if bias is None or not isinstance(mask, bias.CausalBias):
        return arguments
    lower_right = mask.variant == bias.CausalVariant.LOWER_RIGHT
    unequal = arguments.query.shape[-2] != arguments.key.shape[-2]
    variant = AttentionVariant(bottom_right=True) if lower_right and unequal else PLAIN
    return arguments._replace(attn_mask=None, is_causal=True, variant=variant)


_tuple = tuple.__new__
_BEYOND = tuple(Arguments._field_defaults.values())
"""Defaults of the arguments that SDPA does not have."""


Handler = Callable[[Arguments, Callable[[], Tensor], Callable[..., Tensor]], Tensor]
"""`handler(arguments, proceed, sdpa) -> output`: `proceed()` makes the original call of the
function `sdpa`."""

Traced = Callable[[Arguments, Callable[[], Tensor]], Tensor]
"""`traced(arguments, proceed) -> output`: function that `torch.compile` traces in place of the
call. A compiled model is recompiled if this function's code, or a value that the function reads,
has changed."""

Observer = Callable[..., None]
"""`observer(output, sdpa, *args, **kwargs)`: called after the function `sdpa` has returned `output`
for the arguments `*args, **kwargs`."""

_active = threading.Lock()


@dataclass(slots=True)
class _Position:
    """Handled calls of a thread."""

    inside: bool = False
    """True inside a handled or observed call."""
    handled: int = 0
    """Number of handled calls that have started so far."""
    refused: int = 0
    """Depth of calls whose arguments SDPA cannot express, and which are counted after their end."""


class _PerThread(threading.local):
    def __init__(self) -> None:
        self.position = _Position()  # one object, because a thread-local look-up is slow


_thread = _PerThread()


@contextlib.contextmanager
def intercept(
    handler: Handler, traced: Traced | None = None, *, keeps_fast_path: bool = False
) -> Iterator[None]:
    """Route every SDPA call of this process, from any thread, through `handler`.

    During the interception, compiled modules run eagerly. If `traced` is given, compiled modules
    stay compiled, with `traced` in place of the call. Unless `keeps_fast_path`,
    `nn.MultiheadAttention` does not use its fused fast path, so that no call is missed. On exit
    everything is restored and earlier compiled code is used again. SDPA calls inside an SDPA
    implementation belong to the outer call and are not handled again.

    Raises:
        RuntimeError: another interception is active.
    """
    replacing = functools.partial(_handled, handler, traced)
    with _intercepted(replacing, eagerly=traced is None, keeps_fast_path=keeps_fast_path):
        yield


@contextlib.contextmanager
def observe(
    observer: Observer, mark: Callable[[], None] = lambda: None, *, eagerly: bool = True
) -> Iterator[None]:
    """Call `observer` after every SDPA call, in a third of the time that `intercept` takes.

    `mark` is called before each call, after it, and after `observer`. If `eagerly`, compiled
    modules run eagerly, so that their SDPA calls are seen.

    `nn.MultiheadAttention` stays on its fused fast path, because its other path is not
    bit-identical.

    Raises:
        RuntimeError: another interception is active.
    """
    replacing = functools.partial(_observed, observer, mark)
    with _intercepted(replacing, eagerly=eagerly, keeps_fast_path=True):
        yield


@dataclass(slots=True)
class _State:
    """State of an interception. Every call reads this state."""

    is_over: bool = False


_Replacing = Callable[[Callable[..., Tensor], _State], Callable[..., Tensor]]
"""`replacing(sdpa, state)`: function that returns the replacement of `sdpa`."""


@contextlib.contextmanager
def _intercepted(replacing: _Replacing, *, eagerly: bool, keeps_fast_path: bool) -> Iterator[None]:
    if not _active.acquire(blocking=False):
        raise RuntimeError(
            "scaled_dot_product_attention is already intercepted; "
            "end that recording, leave that use_kernel or use_plan, or remove that applied plan, "
            "before starting another"
        )
    try:
        with contextlib.ExitStack() as stack:
            if eagerly:
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            if not keeps_fast_path:
                fast_path = torch.backends.mha.get_fastpath_enabled()
                torch.backends.mha.set_fastpath_enabled(False)
                stack.callback(torch.backends.mha.set_fastpath_enabled, fast_path)
            stack.enter_context(_replaced_everywhere(replacing))
            yield
    finally:
        _active.release()


def answer(
    handler: Handler,
    arguments: Arguments,
    proceed: Callable[[], Tensor],
    sdpa: Callable[..., Tensor],
) -> Tensor:
    """Pass a call to `handler`, unless this thread is already inside a handled call."""
    position = _thread.position
    if position.inside:
        return proceed()
    position.inside = True
    position.handled += 1
    try:
        return handler(arguments, proceed, sdpa)
    finally:
        position.inside = False


def is_inside() -> bool:
    """Return whether the calling thread is inside a handled call."""
    return _thread.position.inside


def is_counted() -> bool:
    """Return whether the calling thread is inside a call that is handled, or counted at its end."""
    return _thread.position.inside or _thread.position.refused > 0


@contextlib.contextmanager
def refused_call() -> Iterator[None]:
    """Mark a call that runs unchanged and is counted at its end."""
    _thread.position.refused += 1
    try:
        yield
    finally:
        _thread.position.refused -= 1


def calls_handled() -> int:
    """Return the number of handled calls of this thread so far."""
    return _thread.position.handled


def _like_the_original(replacement: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Give a replacement the original's name, so that pickle stores a reference to the original."""
    functools.update_wrapper(replacement, TORCH_SDPA, assigned=("__name__", "__doc__"))
    replacement.__module__, replacement.__qualname__ = F.__name__, replacement.__name__
    return replacement


def _handled(
    handler: Handler, traced: Traced | None, sdpa: Callable[..., Tensor], state: _State
) -> Callable[..., Tensor]:
    @_like_the_original
    def scaled_dot_product_attention(*args: Any, **kwargs: Any) -> Tensor:
        # Checked first, because the code below cannot be traced.
        if traced is not None and torch.compiler.is_compiling():
            return traced(bind(*args, **kwargs), lambda: sdpa(*args, **kwargs))
        # A closure may still hold this function after the interception has ended.
        arguments = None
        if not (state.is_over or is_inside()):
            with contextlib.suppress(TypeError, ValueError):  # let SDPA raise its own error
                arguments = bind(*args, **kwargs)
        if arguments is None:
            return sdpa(*args, **kwargs)
        return answer(handler, arguments, lambda: sdpa(*args, **kwargs), sdpa)

    return scaled_dot_product_attention


def _observed(
    observer: Observer, mark: Callable[[], None], sdpa: Callable[..., Tensor], state: _State
) -> Callable[..., Tensor]:
    thread, is_compiling = _thread, torch.compiler.is_compiling

    @_like_the_original
    def scaled_dot_product_attention(*args: Any, **kwargs: Any) -> Tensor:
        if is_compiling():  # torch.export traces in spite of the stance
            return sdpa(*args, **kwargs)
        position = thread.position
        if position.inside or state.is_over:
            return sdpa(*args, **kwargs)
        position.inside = True
        position.handled += 1
        gradients = None
        if following:
            args, kwargs, gradients = begin_call(args, kwargs)
        mark()
        try:
            try:
                output = sdpa(*args, **kwargs)
            finally:
                mark()
            if gradients is not None:
                gradients.returned(output, functools.partial(bind, *args, **kwargs))
            try:
                observer(output, sdpa, *args, **kwargs)
            except TypeError as error:
                # A program may have replaced SDPA with a function that has more arguments.
                if error.__traceback__ is None or error.__traceback__.tb_next is not None:
                    raise
            return output
        finally:
            mark()
            position.inside = False
            if gradients is not None:
                gradients.release()

    return scaled_dot_product_attention


@contextlib.contextmanager
def _replaced_everywhere(replacing: _Replacing) -> Iterator[None]:
    state = _State()
    # The program may already have replaced F.scaled_dot_product_attention.
    originals = {id(sdpa): sdpa for sdpa in (TORCH_SDPA, F.scaled_dot_product_attention)}
    replacements = {key: replacing(sdpa, state) for key, sdpa in originals.items()}
    try:
        swap_references(replacements)
        yield
    finally:
        state.is_over = True
        # All modules are searched, because modules imported meanwhile may hold the replacement.
        swap_references({id(replacements[key]): sdpa for key, sdpa in originals.items()})


def swap_references(functions: dict[int, Callable[..., Any]]) -> None:
    """Replace functions in every loaded module except this one; `functions` is keyed by id."""
    for module in list(sys.modules.values()):
        if not isinstance(module, types.ModuleType) or vars(module) is globals():
            continue
        namespace = vars(module)
        # Copied into a list first, because other threads may import modules.
        if functions.keys().isdisjoint(map(id, list(namespace.values()))):
            continue
        for name, held in list(namespace.items()):
            if id(held) in functions and name != "TORCH_SDPA":
                namespace[name] = functions[id(held)]  # some modules forbid setattr
