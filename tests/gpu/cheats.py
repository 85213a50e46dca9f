"""Kernels that are faster than attention by cheats that only a GPU allows."""

import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

_kept: dict[int, Tensor] = {}
_side = torch.cuda.Stream() if torch.cuda.is_available() else None
_graphs: dict[tuple[int, ...], tuple[torch.cuda.CUDAGraph, Tensor]] = {}
_thread = ThreadPoolExecutor(1)
"""One thread for all calls, because cuDNN's plans belong to a thread and end with the thread."""
_copies: list[Tensor] = []
_calls: dict[tuple[int, ...], int] = {}


def on_a_stream_that_nobody_joins(query, *others, **options):
    """Runs on its own stream and forgets to make the current stream wait."""
    assert _side is not None
    _side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(_side):
        return scaled_dot_product_attention(query, *others, **options)


def kept_by_pointer(query, *others, **options):
    """Returns a copy of its earlier output for this address."""
    if query.data_ptr() not in _kept:
        _kept[query.data_ptr()] = scaled_dot_product_attention(query, *others, **options)
    return _kept[query.data_ptr()].clone()


def with_a_clock_of_its_own(*arguments, **options):
    """Makes every event ten times faster."""
    real = torch.cuda.Event.elapsed_time
    if not getattr(real, "is_ours", False):

        def faster(self: Any, end: Any) -> float:
            return real(self, end) / 10

        faster.is_ours = True  # type: ignore[attr-defined]
        torch.cuda.Event.elapsed_time = faster  # type: ignore[method-assign]
    return scaled_dot_product_attention(*arguments, **options)


def on_two_streams_of_which_one_is_joined(query, key, value, *others, **options):
    """Runs half of the heads on each of two streams, and forgets to wait for the second."""
    assert _side is not None
    here = torch.cuda.current_stream()
    output = torch.empty_like(query)
    middle = query.shape[1] // 2
    for heads, stream in ((slice(None, middle), here), (slice(middle, None), _side)):
        stream.wait_stream(here)
        with torch.cuda.stream(stream):
            parts = (each[:, heads] for each in (query, key, value))
            output[:, heads] = scaled_dot_product_attention(*parts, *others, **options)
    return output


def from_a_thread(query, *others, **options):
    """Launches from a thread on a separate stream, and waits only for the thread."""
    return _thread.submit(on_a_stream_that_nobody_joins, query, *others, **options).result()


def replays_a_graph_of_old_inputs(query, key, value, *others, **options):
    """Captures a graph over its own copies of the first inputs, and forgets to copy the next."""
    place = (-query.data_ptr(), key.data_ptr(), value.data_ptr())
    if place not in _graphs:
        copies = (query.clone(), key.clone(), value.clone())
        _copies.extend(copies)
        _graphs[place] = _captured(*copies, *others, **options)
    graph, output = _graphs[place]
    graph.replay()
    return output.clone()


def replays_a_graph_that_lost_a_launch(query, key, value, *others, **options):
    """From the third call on, half of the heads are left over from an earlier call."""
    place = (query.data_ptr(), -key.data_ptr(), value.data_ptr())
    if place not in _graphs:
        _graphs[place] = _captured(query, key, value, *others, **options)
    _calls[place] = _calls.get(place, 0) + 1
    graph, output = _graphs[place]
    if _calls[place] < 3:
        graph.replay()
    else:
        heads = slice(None, query.shape[1] // 2)
        parts = (each[:, heads] for each in (query, key, value))
        output[:, heads] = scaled_dot_product_attention(*parts, *others, **options)
    return output.clone()


def records_the_timers_event_again(*arguments, **options):
    """Records its caller's start event again once its work is enqueued."""
    output = scaled_dot_product_attention(*arguments, **options)
    frame = sys._getframe(1)
    while frame is not None:
        start = frame.f_locals.get("start")
        if isinstance(start, torch.cuda.Event):
            start.record()
            break
        frame = frame.f_back  # type: ignore[assignment]
    return output


def waits_inside(*arguments, **options):
    """Honest: synchronises before it returns."""
    output = scaled_dot_product_attention(*arguments, **options)
    torch.cuda.synchronize()
    return output


def replays_a_graph(query, key, value, *others, **options):
    """Honest: captures a CUDA graph for these addresses and replays the graph."""
    pointers = (query.data_ptr(), key.data_ptr(), value.data_ptr())
    if pointers not in _graphs:
        _graphs[pointers] = _captured(query, key, value, *others, **options)
    graph, output = _graphs[pointers]
    graph.replay()
    return output.clone()


def _captured(*arguments: Any, **options: Any) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """Capture a graph of attention over these tensors; return the graph and its output."""
    scaled_dot_product_attention(*arguments, **options)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = scaled_dot_product_attention(*arguments, **options)
    return graph, output
