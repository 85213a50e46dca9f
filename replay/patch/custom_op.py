"""Attention as one opaque node of a compiled graph: the operator `attention_replay::attend`.

`torch.compile` must know an output's strides before any kernel has run, so the operator fixes them:
the output has the query's memory layout, as the outputs of PyTorch's fused backends do. For a model
that transposes its query from (B, S, H, D), this is the layout in which its own reshape after
attention is free. An output in another layout is copied, and the copy is counted.

The kernel is chosen and checked when the graph runs (`answering`), as without compilation. Kernels
that depend on the denoising step have an operator of their own, `attention_replay::attend_by_step`,
which finds the step when it runs, so one graph serves all steps. Outside `answering`, the operators
are PyTorch's own attention.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from capture.hooks.autocast import autocast_dtype, cast
from capture.hooks.graph_constant import constant_in_graphs
from capture.hooks.interceptor import TORCH_SDPA, Arguments, Traced
from replay.plan.step_ranges import MARK

NAME = "attention_replay::attend"


class Answers(Protocol):
    """Provider of the operator's outputs.

    `kernel` is the kernel's name in the graph, or an empty string if the module of the call was
    unknown during tracing.
    """

    def answer(self, kernel: str, arguments: Arguments) -> Tensor:
        """Return the output in the query's layout (see `laid_out`)."""

    def refuse(self, kernel: str, reason: str) -> None:
        """Record a call that is compiled without the operator; called once, while tracing."""


_answers: list[Answers] = []


@contextlib.contextmanager
def answering(answers: Answers) -> Iterator[None]:
    """Let `answers` compute the operator's outputs in every thread, inside a `with` block."""
    _answers.append(answers)
    try:
        yield
    finally:
        _answers.remove(answers)


def calling_operator(choose: Callable[[Arguments], str | None]) -> Traced:
    """Return the function to trace in place of SDPA: the operator with the kernel of `choose`.

    `choose` is traced too. Models with the same names share their graphs.
    """

    def traced(arguments: Arguments, proceed: Callable[[], Tensor]) -> Tensor:
        kernel = choose(arguments) or ""
        reason = _why_not_the_operator(arguments)
        if reason is None:
            arguments = cast(arguments, autocast_dtype(arguments.query))
            operator = attend_by_step if kernel.startswith(MARK) else attend
            output: Tensor = operator(kernel, *arguments[:8])
            return output
        _refuse(kernel, reason)
        return proceed()

    return traced


@constant_in_graphs
def _refuse(kernel: str, reason: str) -> None:
    if _answers:
        _answers[-1].refuse(kernel, reason)


def _why_not_the_operator(arguments: Arguments) -> str | None:
    """State why a call stays PyTorch's own in the graph; None if the operator can be used."""
    query, key, value, attn_mask = arguments[:4]
    if query.is_nested or query.ndim != 4 or key.ndim != 4 or value.ndim != 4:
        return "not four-dimensional"
    inputs = (query, key, value) if attn_mask is None else (query, key, value, attn_mask)
    if torch.is_grad_enabled() and any(each.requires_grad for each in inputs):
        return "gradients are needed in a compiled graph"
    same_heads = query.shape[1] == key.shape[1] == value.shape[1]
    same_batch = query.shape[0] == key.shape[0] == value.shape[0]
    if not same_batch or not (same_heads or arguments.enable_gqa):
        return "sizes broadcast"
    return None


def strides_like(query: Tensor, last: int) -> tuple[int, ...]:
    """Return the strides of a dense (B, H, S, last) tensor in the query's memory layout.

    The strides equal those of `torch.empty_like(query)`, regardless of gaps in the query. The order
    of dimensions of size 1 is ignored.
    """
    sizes = [*query.shape[:3], last]
    order = sorted(range(3), key=lambda dim: -1 if sizes[dim] == 1 else query.stride(dim))
    strides, step = [0, 0, 0, 1], last
    for dim in order:
        strides[dim] = step
        step = step * sizes[dim]
    return tuple(strides)


def laid_out(output: Tensor, query: Tensor) -> tuple[Tensor, bool]:
    """Restride the output (B, H, S, Dv) to `strides_like`; also return True if it was copied."""
    strides = strides_like(query, output.shape[-1])
    if output.stride() == strides:
        return output, False
    dimensions = zip(output.shape, output.stride(), strides, strict=True)
    if all(size == 1 or actual == expected for size, actual, expected in dimensions):
        return output.as_strided(output.shape, strides), False
    return output.new_empty_strided(output.shape, strides).copy_(output), True


def costs_reshape(output: Tensor, query: Tensor) -> bool:
    """Return True if a reshape to (B, S, H·Dv) copies this output, but not one laid out as `query`.

    A model that is not compiled makes this copy itself.
    """
    return _heads_inside(query) and not _heads_inside(output)


def _heads_inside(tensor: Tensor) -> bool:
    """Return True if a tensor (B, H, S, D) is a view of (B, S, H, D), or if H or S is 1."""
    heads, length = tensor.shape[1:3]
    return heads == 1 or length == 1 or tensor.stride(1) < tensor.stride(2)


def _attend(
    kernel: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    """Run `kernel` on SDPA's arguments; return (B, Hq, Sq, Dv) in the query's layout."""
    arguments = Arguments(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if _answers:
        return _answers[-1].answer(kernel, arguments)
    return laid_out(TORCH_SDPA(*arguments[:6], scale=scale, enable_gqa=enable_gqa), query)[0]


def _empty_output(
    kernel: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    last = value.shape[-1]
    return query.new_empty_strided((*query.shape[:3], last), strides_like(query, last))


def _operator(name: str, **options: Any) -> Any:
    operator = torch.library.custom_op(name, mutates_args=(), **options)(_attend)
    operator.register_fake(_empty_output)
    return operator


attend = _operator(NAME)
# Inductor leaves an operator with this tag out of its CUDA graphs. Versions of PyTorch without it
# capture the operator, which refuses (`replay.patch.denoising_steps.current_step`).
_unsafe = getattr(torch._C.Tag, "cudagraph_unsafe", None)
attend_by_step = _operator(f"{NAME}_by_step", **({"tags": (_unsafe,)} if _unsafe else {}))
"""The same operator, for kernels that depend on the denoising step."""
