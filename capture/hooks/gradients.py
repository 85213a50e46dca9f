"""Follows the gradients of attention calls, without changing a bit of them.

The tensors that a function receives pass through one autograd node, which returns them as they are.
In the backward pass this node sees the gradients that the function's own backward returned, before
they are added to those of other uses. Views share memory, so the node keeps no tensors alive.

With reentrant checkpointing (`use_reentrant=True`, or any autograd function that runs attention
under `no_grad` and again in its backward), only the second run has gradients. Both runs have the
same autograd context, an argument `ctx` on the stack, which carries the first run's calls over.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.nn import Parameter

from capture.call.gradients import GRADIENTS
from capture.errors import reason_of, reraise_from_signal_handler
from capture.hooks.modes import outside_of_modes
from capture.hooks.phases import in_backward

Receive = Callable[[dict[str, Tensor]], None]
"""Function that receives the gradients of a call, by the name of their tensor."""

_CALLS = "_attention_calls"
"""Attribute of an autograd context that holds the calls of its first run."""


class _Place(NamedTuple):
    """Place of an argument's gradient among the gradients of the node's inputs."""

    number: int
    memory: tuple[torch.Size, tuple[int, ...]] | None = None
    """Size and strides of the node's input, if the argument is a view of it; otherwise None."""
    view: tuple[torch.Size, tuple[int, ...], int] = (torch.Size(), (), 0)
    """Size, strides and offset of the view."""

    def of(self, gradients: tuple[Tensor | None, ...]) -> Tensor | None:
        """Return the argument's gradient; None if none came."""
        gradient = gradients[self.number]
        if gradient is None or self.memory is None:
            return gradient
        memory = gradient.new_empty_strided(*self.memory)
        return memory.copy_(gradient).as_strided(*self.view)


class CallGradients:
    """Gradients of one attention call.

    The node holds this object. So this object holds tensors only until the function has returned,
    because Python does not free a cycle through the graph.
    """

    def __init__(self, first_run: CallGradients | None = None) -> None:
        self._first_run = first_run
        self._inputs: tuple[Tensor, ...] = ()
        self._output: Tensor | None = None
        self._arguments: Callable[[], Any] = lambda: None
        self._places: dict[str, _Place] = {}
        self._grad_output: Tensor | None = None
        self._receive: Receive | None = None

    def through_node(self, tensors: list[Tensor]) -> tuple[Tensor, ...]:
        """Return the tensors as outputs of the node."""
        with outside_of_modes():
            self._inputs = _Inputs.apply(self, *tensors)
        return self._inputs

    def watch(self, receive: Receive) -> None:
        """Call `receive` once, in the backward pass, with gradients in the arguments' shapes."""
        self._receive = receive
        output = self._output
        if not self._inputs or not isinstance(output, Tensor) or output.grad_fn is None:
            return
        arguments = self._arguments()
        named = ((name, getattr(arguments, name, None)) for name in GRADIENTS)
        found = ((name, self._place(tensor)) for name, tensor in named if tensor is not None)
        self._places = {name: place for name, place in found if place is not None}
        index = output.output_nr

        def keep(gradients: tuple[Tensor | None, ...]) -> None:
            if self._receive is not None:
                self._grad_output = gradients[index]

        output.grad_fn.register_prehook(keep)

    def returned(
        self,
        output: Any,
        arguments: Callable[[], Any],
        to_sdpa: Callable[[Tensor], Tensor] = lambda output: output,
    ) -> None:
        """Keep the function's own result until `release`.

        Args:
            arguments: function that returns an object with the call's tensors, which are the
                function's or views of them.
            to_sdpa: conversion of the result, and of its gradient, to SDPA's layout.
        """
        self._arguments, self._to_sdpa = arguments, to_sdpa
        self._output = output[0] if isinstance(output, (tuple, list)) and output else output
        if self._first_run is not None and self._first_run._receive is not None:
            with _problems_told():
                self.watch(self._first_run._receive)

    def release(self) -> None:
        """Let go of the tensors at the end of the call."""
        self._inputs, self._output, self._first_run = (), None, None
        self._arguments = lambda: None
        _thread.call = None

    def arrived(self, gradients: tuple[Tensor | None, ...]) -> None:
        """Hand the gradients over, at the end of the call's backward."""
        receive, grad_output = self._receive, self._grad_output
        self._receive = self._grad_output = None
        if receive is None or grad_output is None:
            return
        with _problems_told(), torch.no_grad(), outside_of_modes():
            found = {name: place.of(gradients) for name, place in self._places.items()}
            given = {name: each.detach() for name, each in found.items() if each is not None}
            receive({"output": self._to_sdpa(grad_output.detach()), **given})

    def _place(self, tensor: Tensor) -> _Place | None:
        """Return the place of the gradient of a tensor; None if it is not a view of an input."""
        node, index = self._inputs[0].grad_fn, tensor.output_nr
        reached = tensor.grad_fn
        while reached is not None and reached is not node:
            if len(reached.next_functions) != 1:
                return None
            reached, index = reached.next_functions[0]
        if reached is None:
            return None
        base = self._inputs[index]
        if tensor is base:
            return _Place(index)
        shares = tensor.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()
        if not shares or 0 in base.stride() or tensor.numel() > base.numel():
            return None
        offset = int(tensor.storage_offset()) - int(base.storage_offset())
        view = (tensor.shape, tensor.stride(), offset)
        return _Place(index, (base.shape, base.stride()), view)


class _Inputs(torch.autograd.Function):
    """The node through which a call's inputs pass."""

    @staticmethod
    def forward(ctx: Any, call: CallGradients, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.call.arrived(gradients)
        return None, *gradients


class _PerThread(threading.local):
    call: CallGradients | None = None


_thread = _PerThread()
following: list[Callable[[str], None]] = []
"""Receivers of a sentence about each problem; not empty while gradients are followed."""


@contextlib.contextmanager
def gradients_followed(tell: Callable[[str], None]) -> Iterator[None]:
    """Follow the gradients of every attention call that begins before the exit.

    Args:
        tell: function that receives a sentence about each problem, from any thread.
    """
    following.append(tell)
    try:
        yield
    finally:
        following.remove(tell)


def current_gradients() -> CallGradients | None:
    """Return the gradients of the call that this thread handles; None if they are not followed."""
    return _thread.call


def begin_call(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], CallGradients | None]:
    """Return a function's arguments, as outputs of the node where they require gradients.

    If a third result is returned, the caller calls its `release` at the end of the call.
    """
    found: tuple[tuple[Any, ...], dict[str, Any], CallGradients | None] = args, kwargs, None
    with _problems_told():
        found = _begun(args, kwargs)
    _thread.call = found[2]
    return found


def _begun(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], CallGradients | None]:
    if torch._C._is_tracing():
        return args, kwargs, None
    if not torch.is_grad_enabled():
        context = _context()
        if context is None:
            return args, kwargs, None
        call = CallGradients()
        vars(context).setdefault(_CALLS, []).append(call)
        return args, kwargs, call
    first_run = _first_run()
    given = [*args, *kwargs.values()]
    places = [place for place, each in enumerate(given) if _is_followed(each)]
    # With a tensor that is passed twice, its gradients could be added in another order.
    if not places or len({id(given[place]) for place in places}) < len(places):
        return args, kwargs, None
    call = CallGradients(first_run)
    inputs = call.through_node([given[place] for place in places])
    for place, tensor in zip(places, inputs, strict=True):
        given[place] = tensor
    return tuple(given[: len(args)]), dict(zip(kwargs, given[len(args) :], strict=True)), call


@contextlib.contextmanager
def _problems_told() -> Iterator[None]:
    """Report an exception, and end it here, so that the model continues."""
    try:
        yield
    except Exception as error:
        reraise_from_signal_handler(error)
        for tell in following:
            tell(f"the gradients of an attention call could not be recorded: {reason_of(error)}")


def _is_followed(value: Any) -> bool:
    # Other subclasses could change their type in the node. Transforms need rules for it.
    return (
        type(value) in (Tensor, Parameter)
        and value.requires_grad
        and not value.is_nested
        and not torch._C._functorch.is_functorch_wrapped_tensor(value)
        and torch.autograd.forward_ad._current_level < 0
    )


def _first_run() -> CallGradients | None:
    """Return the first run of the call that begins now; None if this is not a second run."""
    context = _context() if in_backward() else None
    calls = None if context is None else vars(context).get(_CALLS)
    return calls.pop(0) if calls else None


def _context() -> Any:
    """Return the context of the innermost autograd function on the stack; None without one."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_varnames[:1] == ("ctx",):
            context = frame.f_locals.get("ctx")
            if isinstance(context, FunctionCtx):
                return context
        frame = frame.f_back  # type: ignore[assignment]
    return None
