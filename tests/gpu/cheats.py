"""Kernels that are faster than attention, for reasons that only a GPU has."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

_kept: dict[int, Tensor] = {}
_side = torch.cuda.Stream() if torch.cuda.is_available() else None
_graphs: dict[tuple[int, ...], tuple[torch.cuda.CUDAGraph, Tensor]] = {}


def on_a_stream_that_nobody_joins(query: Tensor, *others: Any, **options: Any) -> Tensor:
    """A library with streams of its own forgets to make the current one wait."""
    assert _side is not None
    _side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(_side):
        return scaled_dot_product_attention(query, *others, **options)


def kept_by_pointer(query: Tensor, *others: Any, **options: Any) -> Tensor:
    """Returns a copy of what it computed for this address before."""
    if query.data_ptr() not in _kept:
        _kept[query.data_ptr()] = scaled_dot_product_attention(query, *others, **options)
    return _kept[query.data_ptr()].clone()


def with_a_clock_of_its_own(*arguments: Any, **options: Any) -> Tensor:
    """Makes every event ten times faster."""
    real = torch.cuda.Event.elapsed_time
    if not getattr(real, "is_ours", False):

        def faster(self: Any, end: Any) -> float:
            return real(self, end) / 10

        faster.is_ours = True  # type: ignore[attr-defined]
        torch.cuda.Event.elapsed_time = faster  # type: ignore[method-assign]
    return scaled_dot_product_attention(*arguments, **options)


def waits_inside(*arguments: Any, **options: Any) -> Tensor:
    """Honest: synchronises before it returns."""
    output = scaled_dot_product_attention(*arguments, **options)
    torch.cuda.synchronize()
    return output


def replays_a_graph(
    query: Tensor, key: Tensor, value: Tensor, *others: Any, **options: Any
) -> Tensor:
    """Honest: captures a CUDA graph for these addresses and replays it."""
    pointers = (query.data_ptr(), key.data_ptr(), value.data_ptr())
    if pointers not in _graphs:
        scaled_dot_product_attention(query, key, value, *others, **options)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = scaled_dot_product_attention(query, key, value, *others, **options)
        _graphs[pointers] = graph, output
    graph, output = _graphs[pointers]
    graph.replay()
    return output.clone()
