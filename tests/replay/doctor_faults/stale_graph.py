"""Kernels that reuse data of an earlier call, like a stale CUDA graph.

Graphs exist for some lengths only, as in serving engines; other lengths run eagerly and are right.
"""

from arguments import attend, attend_in_float32, with_sdpa_arguments, with_sdpa_signature
from torch import Tensor

GRAPH_LENGTHS = (64, 1)
"""Numbers of queries for which a graph is captured."""

_outputs: dict[tuple, Tensor] = {}
_buffers: dict[tuple, list[Tensor]] = {}
_masks: dict[tuple, Tensor] = {}
_scales: dict[tuple, float] = {}
_calls: dict[tuple, int] = {}


def _has_graph(query: Tensor) -> bool:
    return query.shape[2] in GRAPH_LENGTHS


def _shapes(*tensors: Tensor) -> tuple:
    return tuple((*each.shape, each.dtype) for each in tensors)


@with_sdpa_arguments
def output_by_pointer(query, key, value, bias, scale) -> Tensor:
    """Equal addresses are assumed to hold equal values."""
    if not _has_graph(query):
        return attend_in_float32(query, key, value, bias, scale)
    tensors = (query, key, value)
    place = ("pointer", *_shapes(*tensors), *(each.data_ptr() for each in tensors))
    if place not in _outputs:
        _outputs[place] = attend_in_float32(query, key, value, bias, scale)
    return _outputs[place].clone()


@with_sdpa_arguments
def output_by_shape(query, key, value, bias, scale) -> Tensor:
    """A graph is replayed without copying this call's inputs into its buffers."""
    if not _has_graph(query):
        return attend_in_float32(query, key, value, bias, scale)
    place = ("shape", *_shapes(query, key, value))
    if place not in _outputs:
        _outputs[place] = attend_in_float32(query, key, value, bias, scale)
    return _outputs[place].clone()


@with_sdpa_arguments
def text_keys_kept(query, key, value, bias, scale) -> Tensor:
    """Keys and values of cross-attention come from the prompt, so they are kept from the first
    step."""
    if query.shape[2] == key.shape[2]:
        return attend_in_float32(query, key, value, bias, scale)
    place = ("text", *_shapes(query, key, value))
    if place not in _buffers:
        _buffers[place] = [key.clone(), value.clone()]
    return attend_in_float32(query, *_buffers[place], bias, scale)


@with_sdpa_arguments
def decoded_query_kept(query, key, value, bias, scale) -> Tensor:
    """The decode graph reads the current cache, but the query of the captured call."""
    if query.shape[2] != 1:
        return attend_in_float32(query, key, value, bias, scale)
    place = ("decode", *_shapes(query, key, value))
    if place not in _buffers:
        _buffers[place] = [query.clone()]
    return attend_in_float32(*_buffers[place], key, value, bias, scale)


@with_sdpa_arguments
def copied_if_the_first_element_changed(query, key, value, bias, scale) -> Tensor:
    """The input buffers are refreshed only if the query's first element changed."""
    if not _has_graph(query):
        return attend_in_float32(query, key, value, bias, scale)
    place = ("first", *_shapes(query, key, value))
    kept = _buffers.get(place)
    if kept is None or kept[0][0, 0, 0, 0] != query[0, 0, 0, 0]:
        _buffers[place] = [query.clone(), key.clone(), value.clone()]
    return attend_in_float32(*_buffers[place], bias, scale)


@with_sdpa_arguments
def captured_after_two_calls(query, key, value, bias, scale) -> Tensor:
    """Two calls warm up eagerly, the third is captured, and all later calls replay the third."""
    if not _has_graph(query):
        return attend_in_float32(query, key, value, bias, scale)
    place = ("third", *_shapes(query, key, value))
    _calls[place] = _calls.get(place, 0) + 1
    if _calls[place] < 3:
        return attend_in_float32(query, key, value, bias, scale)
    if place not in _outputs:
        _outputs[place] = attend_in_float32(query, key, value, bias, scale)
    return _outputs[place].clone()


@with_sdpa_signature
def first_mask_of_a_shape(query, key, value, attn_mask, is_causal, scale) -> Tensor:
    """The mask's buffer is filled when a graph is captured, and never again."""
    if attn_mask is not None and _has_graph(query):
        attn_mask = _masks.setdefault(_shapes(query, key, attn_mask), attn_mask.clone())
    return attend(query, key, value, attn_mask, is_causal, scale)


@with_sdpa_arguments
def first_scale_of_a_shape(query, key, value, bias, scale) -> Tensor:
    """The scale is a constant of the captured graph."""
    if _has_graph(query):
        scale = _scales.setdefault(_shapes(query, key, value), scale)
    return attend_in_float32(query, key, value, bias, scale)


@with_sdpa_signature
def value_kept_by_shape(query, key, value, attn_mask, is_causal, scale) -> Tensor:
    """Query and key are copied to the graph's buffers; a refactoring lost the line for values."""
    if _has_graph(query):
        place = ("value", *_shapes(query, key, value))
        value = _buffers.setdefault(place, [value.clone()])[0]
    return attend(query, key, value, attn_mask, is_causal, scale)
