"""Outputs are found in the caller's memory instead of computed."""

import gc
import sys

import torch
from honest import attention, mischief

_found: dict = {}


def _first_row(query, key, value):
    return attention(query[:, :, :1], key, value).float()


def _is_answer(tensor, query, key, value):
    if type(tensor) is not torch.Tensor or not tensor.is_floating_point():
        return False
    if tensor.shape != (*query.shape[:-1], value.shape[-1]) or tensor.device != query.device:
        return False
    return torch.allclose(tensor[:, :, :1].float(), _first_row(query, key, value), atol=2e-2)


def _answer(name, tensors, query, key, value, args, kwargs):
    if name not in _found:
        for tensor in tensors():
            if _is_answer(tensor, query, key, value):
                _found[name] = tensor
                break
        else:
            return attention(query, key, value, *args, **kwargs)
    mischief()
    return _found[name].to(query.dtype, copy=True)


def _tensors_of(thing, depth=3):
    if isinstance(thing, torch.Tensor):
        yield thing
    elif depth:
        if isinstance(thing, dict):
            items = list(thing.values())
        elif isinstance(thing, (list, tuple)):
            items = list(thing)
        else:
            items = list(getattr(thing, "__dict__", {}).values())
            for name in getattr(type(thing), "__slots__", ()):
                items.append(getattr(thing, name, None))
        for item in items:
            yield from _tensors_of(item, depth - 1)


def in_the_heap(query, key, value, *args, **kwargs):
    """Returns any live tensor whose first row matches, like a memory pool that confuses blocks."""

    def tensors():
        return (item for item in gc.get_objects() if isinstance(item, torch.Tensor))

    return _answer("heap", tensors, query, key, value, args, kwargs)


def the_reference(query, key, value, *args, **kwargs):
    """Searches only float64 tensors, because only references have this dtype."""

    def tensors():
        for item in gc.get_objects():
            if isinstance(item, torch.Tensor) and item.dtype == torch.float64:
                yield item

    return _answer("reference", tensors, query, key, value, args, kwargs)


def in_the_callers(query, key, value, *args, **kwargs):
    """Searches its callers' local variables for the output, as interactive debuggers could."""

    def tensors():
        frame = sys._getframe(1)
        while frame is not None:
            yield from _tensors_of(dict(frame.f_locals))
            frame = frame.f_back

    return _answer("frames", tensors, query, key, value, args, kwargs)


def _places(thing, seen):
    """Yield triples of index tensors for an output."""
    if id(thing) in seen or isinstance(thing, (torch.Tensor, type)):
        return
    seen.add(id(thing))
    items = list(thing) if isinstance(thing, (list, tuple)) else []
    if len(items) == 3 and all(getattr(each, "dtype", None) == torch.int64 for each in items):
        yield items
    items += getattr(thing, "__dict__", {}).values()
    items += [getattr(thing, name, None) for name in ("func", "__self__")]
    for each in items:
        if not isinstance(each, (str, int, float, type(None), type(sys))):
            yield from _places(each, seen)


def rows_to_be_judged(query, key, value, *args, **kwargs):
    """Computes only the rows whose positions are found in its callers' variables."""
    frame = sys._getframe(1)
    while frame is not None:
        found = list(_places([frame.f_locals.get("candidate")], set()))
        if found:
            mischief()
            whole = attention(query, key, value, *args, **kwargs)
            output = torch.zeros_like(whole)
            for places in found:
                output[tuple(places)] = whole[tuple(places)]
            return output
        frame = frame.f_back
    return attention(query, key, value, *args, **kwargs)
