"""Kernels that reuse data of an earlier call, like a stale CUDA graph.

Graphs exist for some lengths only, as in serving engines; other lengths run eagerly and are right.
"""

import functools
from collections.abc import Callable
from typing import Any

from arguments import attend, attend_in_float32, with_sdpa_arguments, with_sdpa_signature
from torch import Tensor

GRAPH_LENGTHS = (64, 1)
"""Numbers of queries for which a graph is captured."""

_kept: dict[tuple, Any] = {}


def _place(name: str, *tensors: Tensor) -> tuple:
    return name, *((*each.shape, each.dtype) for each in tensors)


def with_graph(replay: Callable[..., Tensor]):
    """Give a function of (query, key, value, bias, scale) SDPA's signature.

    The function handles only lengths that have a graph.
    """

    @with_sdpa_arguments
    @functools.wraps(replay)
    def attention(query, *others) -> Tensor:
        has_graph = query.shape[2] in GRAPH_LENGTHS
        return (replay if has_graph else attend_in_float32)(query, *others)

    return attention


@with_graph
def output_by_pointer(query, key, value, bias, scale) -> Tensor:
    """Equal addresses are assumed to hold equal values."""
    tensors = (query, key, value)
    place = (*_place("pointer", *tensors), *(each.data_ptr() for each in tensors))
    return _kept.setdefault(place, attend_in_float32(*tensors, bias, scale)).clone()


@with_graph
def output_by_shape(query, key, value, bias, scale) -> Tensor:
    """A graph is replayed without copying this call's inputs into its buffers."""
    output = attend_in_float32(query, key, value, bias, scale)
    return _kept.setdefault(_place("shape", query, key, value), output).clone()


@with_sdpa_arguments
def text_keys_kept(query, key, value, bias, scale) -> Tensor:
    """Keys and values of cross-attention come from the prompt, so they are kept from the first
    step."""
    if query.shape[2] != key.shape[2]:
        place = _place("text", query, key, value)
        key, value = _kept.setdefault(place, (key.clone(), value.clone()))
    return attend_in_float32(query, key, value, bias, scale)


@with_sdpa_arguments
def decoded_query_kept(query, key, value, bias, scale) -> Tensor:
    """The decode graph reads the current cache, but the query of the captured call."""
    if query.shape[2] == 1:
        query = _kept.setdefault(_place("decode", query, key, value), query.clone())
    return attend_in_float32(query, key, value, bias, scale)


@with_graph
def copied_if_the_first_element_changed(query, key, value, bias, scale) -> Tensor:
    """The input buffers are refreshed only if the query's first element changed."""
    place = _place("first", query, key, value)
    if place not in _kept or _kept[place][0][0, 0, 0, 0] != query[0, 0, 0, 0]:
        _kept[place] = query.clone(), key.clone(), value.clone()
    return attend_in_float32(*_kept[place], bias, scale)


@with_graph
def captured_after_two_calls(query, key, value, bias, scale) -> Tensor:
    """Two calls warm up eagerly, the third is captured, and all later calls replay the third."""
    outputs = _kept.setdefault(_place("third", query, key, value), [])
    if len(outputs) < 3:
        outputs.append(attend_in_float32(query, key, value, bias, scale))
    return outputs[-1].clone()


@with_sdpa_signature
def first_mask_of_a_shape(query, key, value, attn_mask, is_causal, scale) -> Tensor:
    """The mask's buffer is filled when a graph is captured, and never again."""
    if attn_mask is not None and query.shape[2] in GRAPH_LENGTHS:
        attn_mask = _kept.setdefault(_place("mask", query, key, attn_mask), attn_mask.clone())
    return attend(query, key, value, attn_mask, is_causal, scale)


@with_graph
def first_scale_of_a_shape(query, key, value, bias, scale) -> Tensor:
    """The scale is a constant of the captured graph."""
    scale = _kept.setdefault(_place("scale", query, key, value), scale)
    return attend_in_float32(query, key, value, bias, scale)


@with_graph
def value_kept_by_shape(query, key, value, bias, scale) -> Tensor:
    """Query and key are copied to the graph's buffers; a refactoring lost the line for values."""
    value = _kept.setdefault(_place("value", query, key, value), value.clone())
    return attend_in_float32(query, key, value, bias, scale)
