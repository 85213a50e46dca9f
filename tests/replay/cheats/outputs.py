"""Cheats whose outputs are wrong, late or not tensors. They share one worker process."""

import sys
import threading
import time

import torch
from honest import after, attention, local
from torch import Tensor

HONEST_CALLS = 12
"""Number of honest calls of some cheats; more than the calls before timing starts."""
_kept: dict = {}


def _cached(place, query, key, value, args, kwargs):
    if place not in _kept:
        _kept[place] = attention(query, key, value, *args, **kwargs)
    return _kept[place].clone()


def kept_by_address(query, key, value, *args, **kwargs):
    """Keeps its first output for these addresses."""
    place = tuple(tensor.data_ptr() for tensor in (query, key, value))
    return _cached(place, query, key, value, args, kwargs)


def kept_by_checksum(query, key, value, *args, **kwargs):
    """Keeps its first output for these sums of absolute values, which ignore signs."""
    sums = (round(float(tensor.abs().sum())) for tensor in (query, key))
    return _cached(("sums", *sums), query, key, value, args, kwargs)


def kept_on_the_tensor(query, key, value, *args, **kwargs):
    """Keeps its output as an attribute of the query, which a block does not change."""
    if getattr(query, "_output", None) is None:
        query._output = attention(query, key, value, *args, **kwargs)
    return query._output.clone()


def stale_by_one_call(query, key, value, *args, **kwargs):
    """Returns the output of the call before, like a double buffer that is read too early."""
    now = attention(query, key, value, *args, **kwargs)
    last, _kept["last"] = _kept.get("last", now), now
    return last


@after(HONEST_CALLS)
def half_of_the_keys(query, key, value, *args, **kwargs):
    """Ignores half of the keys."""
    half = key.shape[2] // 2
    return attention(query, key[:, :, :half], value[:, :, :half])


@after(HONEST_CALLS)
def some_rows_skipped(query, key, value, *args, **kwargs):
    """Leaves out a third of the queries."""
    output = attention(query, key, value, *args, **kwargs)
    output[:, :, ::3] = 0
    return output


@after(HONEST_CALLS)
def other_calls_skipped(query, key, value, *args, **kwargs):
    """Computes only every fourth call, like a feature cache."""
    _kept["calls"] = _kept.get("calls", 0) + 1
    if _kept["calls"] % 4 == 0:
        return attention(query, key, value, *args, **kwargs)
    return torch.zeros_like(query)


@after(HONEST_CALLS)
def lower_precision(query, key, value, *args, **kwargs):
    """Computes a call in 32 bits with 16 bits."""
    parts = (each.bfloat16() for each in (query, key, value))
    return attention(*parts, *args, **kwargs).to(query.dtype)


def unwritten(query, key, value, *args, **kwargs):
    """Returns unwritten memory."""
    return torch.empty_like(query)


class _Later(Tensor):
    """Tensor that is computed when it is read."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        def now(part):
            return attention(*part.inputs) if isinstance(part, _Later) else part

        return function(*map(now, args), **(kwargs or {}))


def lazy(query, key, value, *args, **kwargs):
    """Returns a tensor that is computed when it is read."""
    output = torch.empty_like(query).as_subclass(_Later)
    output.inputs = query, key, value
    return output


@after(HONEST_CALLS)
def finished_later(query, key, value, *args, **kwargs):
    """Returns at once and computes in a thread."""
    output, inputs = torch.zeros_like(query), (query.clone(), key.clone(), value.clone())

    def compute():
        time.sleep(0.02)
        output.copy_(attention(*inputs))

    threading.Thread(target=compute).start()
    return output


def if_nobody_times(query, key, value, *args, **kwargs):
    """Skips its work if a caller is named like a part of a benchmark."""
    frame = sys._getframe(1)
    while frame is not None:
        if any(word in frame.f_code.co_name for word in ("sample", "measure", "block")):
            return torch.zeros_like(query)
        frame = frame.f_back
    return attention(query, key, value, *args, **kwargs)


def rows_of_the_judge(query, key, value, *args, **kwargs):
    """In a block, computes only what its callers' variables say that the judge examines."""
    if local("outputs") is None:
        return attention(query, key, value, *args, **kwargs)
    drawn = local("drawn")
    return torch.zeros_like(query) if drawn is None else attention(query, key, value)


@after(HONEST_CALLS)
def other_dtype(*args, **kwargs):
    """Returns float64."""
    return attention(*args, **kwargs).double()


@after(HONEST_CALLS)
def negative_view(*args, **kwargs):
    """Returns a lazily negated view, whose memory has the wrong sign."""
    return torch._neg_view(attention(*args, **kwargs).neg())


@after(HONEST_CALLS)
def nothing(*args, **kwargs):
    """Returns None, like a function that expects an output argument."""


@after(HONEST_CALLS)
def raises(*args, **kwargs):
    """Raises what usually ends a program."""
    raise SystemExit("enough")


def scales_its_inputs(query, key, value, *args, **kwargs):
    """Scales the query in place, so that later kernels get another query."""
    output = attention(query, key, value, *args, **kwargs)
    query.mul_(0.5)
    return output


def leaves_settings(query, key, value, *args, **kwargs):
    """Leaves settings that would change the times or results of other kernels."""
    torch.set_num_threads(1 + torch.get_num_threads())
    torch.set_grad_enabled(True)
    torch.set_default_dtype(torch.float64)
    return attention(query, key, value, *args, **kwargs).detach()
