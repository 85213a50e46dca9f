"""Forms of functions' results: what a function returns in addition to attention's output.

A library's function may return a tensor, or always a tuple with the log-sum-exp, depending on its
version. A form is therefore learned from one run of the function, not looked up in a table.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from capture.hooks.interceptor import Arguments

MOST_FUNCTIONS = 1024
"""Maximum number of functions and of calls' keys whose forms are remembered."""


@dataclass(frozen=True)
class ReturnForm:
    """Form of a function's result."""

    sequence: type | None = None
    """Type of the sequence that begins with the output; None if the output is returned alone."""
    length: int = 1
    """Number of items of the sequence; those after the output are None."""
    dtype: torch.dtype | None = None
    """Dtype of the output; None if unknown."""
    is_contiguous: bool = False
    """True if the function returns its output contiguous, so that callers may view it."""
    refusal: str = ""
    """Reason why no kernel returns such a result: `also returns the log-sum-exp`; usually empty."""

    def made_of(self, output: Tensor) -> Any:
        """Return a kernel's output, which is in the function's layout, as the function would."""
        output = output if self.dtype is None else output.to(self.dtype)
        output = output.contiguous() if self.is_contiguous else output
        if self.sequence is None:
            return output
        items = (output, *[None] * (self.length - 1))
        make: Callable[..., Any] = getattr(self.sequence, "_make", self.sequence)
        return make(items)


OUTPUT = ReturnForm()
OUTPUT_AND_WEIGHTS = ReturnForm(tuple, 2)


def form_of(result: Any, output: Any, arguments: Arguments, expected: ReturnForm) -> ReturnForm:
    """Return the form of a function's result.

    Args:
        result: what the function returned.
        output: the result in SDPA's layout; anything but a tensor if that is impossible.
        arguments: the call.
        expected: form that callers of the function expect. If it is `OUTPUT_AND_WEIGHTS`, callers
            accept None instead of the weights.
    """
    is_sequence = isinstance(result, (tuple, list))
    first, *rest = result if is_sequence and result else (result,)
    if expected is OUTPUT_AND_WEIGHTS:
        rest = [None if isinstance(each, Tensor) and each.ndim == 4 else each for each in rest]
    refusal, kind = "", type(result).__name__
    shape = (*arguments.query.shape[1:3], arguments.value.shape[-1])
    if not isinstance(first, Tensor):
        refusal = f"returns a {kind}"
    elif rest and isinstance(rest[0], Tensor) and rest[0].dtype == torch.float32:
        refusal = "also returns the log-sum-exp"
    elif any(each is not None for each in rest):
        refusal = f"returns a {kind} of {len(result)}"
    elif not isinstance(output, Tensor) or output.shape[1:] != shape:
        refusal = "returns a tensor of another shape"
    if refusal:
        return ReturnForm(refusal=refusal)
    sequence = type(result) if is_sequence else None
    return ReturnForm(sequence, 1 + len(rest), first.dtype, first.is_contiguous())


Key = tuple[object, ...]
"""Facts about a call on which the form of its result may depend."""


def key_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Key:
    """Return the given arguments: dtypes of tensors, switches and texts by value, else types."""
    return (*map(_fact, args), *((name, _fact(value)) for name, value in kwargs.items()))


def _fact(value: Any) -> object:
    if isinstance(value, Tensor):
        return value.dtype
    return value if isinstance(value, (bool, str)) else type(value)


def forms_of(function: Callable[..., Any]) -> dict[Key, ReturnForm]:
    """Return the forms learned so far, which all wrappers of a function share."""
    parts: tuple[object, ...] = (function,)
    if isinstance(function, types.FunctionType):  # a wrapper may hold a copy of the function
        parts = (function.__code__, function.__globals__, *(function.__closure__ or ()))
    key = tuple(map(id, parts))
    if key not in _forms:
        if len(_forms) >= MOST_FUNCTIONS:
            _forms.clear()
        _forms[key] = (parts, {})
    return _forms[key][1]


_forms: dict[tuple[int, ...], tuple[tuple[object, ...], dict[Key, ReturnForm]]] = {}
"""Parts of each function, kept alive so that their ids stay theirs, and its forms."""
