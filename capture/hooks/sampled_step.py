"""Finds attention that reaches no entry point, by watching every operation of one step.

Attention is an operator that computes it, or three operations: a product of two activations, a
softmax of this product, and a product of the result with a third tensor. Results of other
operations keep the marks of their inputs, so that scaling, masks, casts and views in between do not
matter. A product with a parameter, or with a tensor that was computed from parameters without a
product, is a linear layer, so logits of classifiers and routers of experts are not attention.
"""

from __future__ import annotations

import contextlib
import functools
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)

from capture.errors import reraise_from_signal_handler
from capture.hooks.autocast import is_any_enabled
from capture.hooks.entry_points import vllm
from capture.hooks.interceptor import calls_handled, is_counted
from capture.hooks.modules import CallSite, ModuleTracker, WatchedModule
from capture.hooks.phases import RECOMPUTE

FUSED_ENCODER = "_transformer_encoder_layer_fwd"
"""Operator of PyTorch's fused encoder layer, which has no forward pass of its own."""

_CONSTANT, _SCORE, _WEIGHT = "constant", "score", "weight"
_KINDS = {
    "attention": re.compile(rf".*(attention|attn|{FUSED_ENCODER}|flash_?fwd).*"),
    "sum": re.compile(r"(add|badd|addb)(mm|bmm|mv)_?"),
    "product": re.compile(r"(_scaled_|_int_)?(mm|bmm|mv)|matmul|linear|v?dot|inner|einsum"),
    "reset": re.compile(r".*(conv(olution|\d).*|embedding.*|lstm.*|gru.*)"),
    "softmax": re.compile(r"(_|_safe_)?softmax|exp2?_?"),
}


class Place(NamedTuple):
    """Place of attention that was missed."""

    module: str
    """Path of the module."""
    followed: str
    """Path of the innermost module whose passes are counted; another one after `.forward()`."""
    operator: str
    """`FUSED_ENCODER`, or empty for all other operators."""


class SampledStep:
    """Watches the first forward pass of each outermost module in each phase.

    Outputs have the same bits as without it. A pass is not watched while the program's own dispatch
    modes, a tracer or `torch.func` are active, or autocast in inference mode, and never inside
    vLLM, whose compiled code would run eagerly.
    """

    def __init__(self, tracker: ModuleTracker) -> None:
        self.found: dict[Place, float] = {}
        """Attention computations for each followed pass. The operator is empty for most."""
        self._tracker = tracker
        self._sampled: set[tuple[str, str]] = set()
        self._thread = threading.local()
        if not vllm.serves(each.module for each in tracker.watched):
            tracker.outermost.append(self)

    def enter(self, watched: WatchedModule, site: CallSite) -> None:
        """Begin to watch a forward pass of an outermost module, if it is the first."""
        key = watched.path, site.phase
        if key in self._sampled or site.phase == RECOMPUTE or _is_transformed():
            return
        self._sampled.add(key)
        if not torch.is_grad_enabled():  # so that weights are cast where the mode sees it
            torch.clear_autocast_cache()
        before = {each.path: each.forwards for each in self._tracker.watched}
        mode = _Operations(watched.module, self._place)
        _let_subclasses_be_made(+1)
        self._thread.mode, self._thread.before = mode, before
        _push_mode(mode)

    def leave(self) -> None:
        """End the watching of the calling thread's forward pass."""
        mode = getattr(self._thread, "mode", None)
        if mode is None:
            return
        self._thread.mode = None
        _remove(mode)
        _let_subclasses_be_made(-1)
        mode.release()
        forwards = {each.path: each.forwards for each in self._tracker.watched}
        for place, computations in mode.found.items():
            passes = forwards.get(place.followed, 0) - self._thread.before.get(place.followed, 0)
            found = computations / max(passes, 1)
            self.found[place] = max(found, self.found.get(place, 0.0))

    def _place(self, operator: str) -> Place:
        followed = self._tracker.running.stack[-1][1].module
        is_named = operator == FUSED_ENCODER
        return Place(self._tracker.site.module, followed, operator if is_named else "")


class _Operations(TorchDispatchMode):
    """Marks the results of operations, until it finds a product with an attention weight.

    Marks belong to storages, so that views and in-place operations need no rules.
    """

    supports_higher_order_operators = True

    def __init__(self, module: nn.Module, place: Callable[[str], Place]) -> None:
        super().__init__()
        self.found: Counter[Place] = Counter()
        self._place = place
        with torch.inference_mode():
            self._inference_keys = (
                torch._C._dispatch_tls_local_include_set(),
                torch._C._dispatch_tls_local_exclude_set(),
            )
        self._marks: dict[int, str] = {}
        self._held: set[int] = set()
        """Storages that are held weakly, so that no other storage gets their address."""
        for tensor in (*module.parameters(), *module.buffers()):
            with contextlib.suppress(Exception):  # tensors without a storage
                self._set(tensor, _CONSTANT)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        handled = calls_handled()
        output = self._run(func, args, kwargs or {})
        # An engine's operator may be written in Python and call an entry point.
        if not is_counted() and calls_handled() == handled:
            try:
                given = [*args, *kwargs.values()] if kwargs else args
                self._mark(_kind(func), func, [*_tensors(given)], [*_tensors((output,))])
            except Exception as error:
                reraise_from_signal_handler(error)  # tensors without a storage have no marks
        return output

    def _run(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run an operation with the same bits as outside of the mode.

        Only in inference mode does a mode get composite operations, such as `linear`. PyTorch would
        then run their parts without autograd's keys, which changes how `matmul` folds dimensions.
        """
        if torch.is_inference_mode_enabled() and _is_composite(func):
            with torch._C._ForceDispatchKeyGuard(*self._inference_keys):
                return func(*args, **kwargs)
        return func(*args, **kwargs)

    def release(self) -> None:
        while self._held:
            torch.UntypedStorage._free_weak_ref(self._held.pop())

    def _mark(self, kind: str, func: Any, given: list[Tensor], outputs: list[Tensor]) -> None:
        mark = None
        if kind == "attention":
            self.found[self._place(_name(func))] += 1
        elif kind in ("sum", "product"):
            factors = given[1:3] if kind == "sum" else given
            marks = [self._get(tensor) for tensor in factors[:2]]
            if _CONSTANT not in marks and len(marks) == 2:
                mark = _SCORE
                if _WEIGHT in marks:
                    mark = None
                    self.found[self._place("")] += 1
        elif kind != "reset":
            marks = [self._get(tensor) for tensor in given if tensor.is_floating_point()]
            if kind == "softmax":
                mark = _WEIGHT if _SCORE in marks else None
            elif _WEIGHT in marks or _SCORE in marks:
                mark = _WEIGHT if _WEIGHT in marks else _SCORE
            elif marks and all(each == _CONSTANT for each in marks):
                mark = _CONSTANT
        for tensor in outputs:
            self._set(tensor, mark)

    def _get(self, tensor: Tensor) -> str | None:
        if isinstance(tensor, nn.Parameter):
            return _CONSTANT
        return self._marks.get(tensor.untyped_storage()._cdata)

    def _set(self, tensor: Tensor, mark: str | None) -> None:
        storage = tensor.untyped_storage()
        address = storage._cdata
        if mark is None:
            self._marks.pop(address, None)
            return
        if address not in self._held:
            storage._weak_ref()
            self._held.add(address)
        self._marks[address] = mark


@functools.cache
def _is_composite(func: Any) -> bool:
    return isinstance(func, torch._ops.OpOverload) and func._can_decompose()


@functools.cache
def _kind(func: Any) -> str:
    name = _name(func)
    matching = (kind for kind, pattern in _KINDS.items() if pattern.fullmatch(name))
    return next(matching, "other")


def _name(func: Any) -> str:
    """Return an operator's name without its namespace and overload."""
    packet = getattr(func, "overloadpacket", func)
    return str(getattr(packet, "__name__", packet))


def _tensors(values: Sequence[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _is_transformed() -> bool:
    """Return whether something acts on this thread's operations that a mode could disturb."""
    return (
        bool(_get_current_dispatch_mode_stack())
        or (torch.is_inference_mode_enabled() and is_any_enabled())
        or torch._C._is_tracing()
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


_watching = 0
_lock = threading.Lock()


def _let_subclasses_be_made(change: int) -> None:
    """Count watched passes, and let `Tensor.__new__` ignore modes while there are any.

    Under a mode, PyTorch cannot make a subclass by calling it, as `causal_lower_right` does.
    """
    global _watching
    with _lock:
        _watching += change
        if _watching and "__new__" not in vars(torch.Tensor):
            setattr(torch.Tensor, "__new__", _made)  # noqa: B010 - mypy forbids the assignment
        elif not _watching and vars(torch.Tensor).get("__new__") is _made:
            delattr(torch.Tensor, "__new__")


def _made(cls: type[Tensor], *args: Any, **kwargs: Any) -> Any:
    with _disable_current_modes():
        return torch._C.TensorBase.__new__(cls, *args, **kwargs)


def _remove(mode: TorchDispatchMode) -> None:
    """Remove a mode from this thread's stack, also below modes that a program forgot to leave."""
    above = []
    while _get_current_dispatch_mode_stack():
        top = _pop_mode()
        if top is mode:
            break
        above.append(top)
    for each in reversed(above):
        _push_mode(each)
