"""Cheats whose outputs are wrong, late or not tensors. They share one worker process."""

import sys

import torch
from honest import after, attention, local

HONEST_CALLS = 12
"""Number of honest calls of some cheats; more than the calls before timing starts."""
_kept: dict = {}


def kept_by_checksum(query, key, value, *args, **kwargs):
    """Keeps its first output for these sums of absolute values, which ignore signs."""
    sums = tuple(round(float(tensor.abs().sum())) for tensor in (query, key))
    if sums not in _kept:
        _kept[sums] = attention(query, key, value, *args, **kwargs)
    return _kept[sums].clone()


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
def nothing(*args, **kwargs):
    """Returns None, like a function that expects an output argument."""


@after(HONEST_CALLS)
def raises(*args, **kwargs):
    """Raises what usually ends a program."""
    raise SystemExit("enough")


def leaves_settings(query, key, value, *args, **kwargs):
    """Leaves settings that would change the times or results of other kernels."""
    torch.set_num_threads(1 + torch.get_num_threads())
    torch.set_grad_enabled(True)
    torch.set_default_dtype(torch.float64)
    return attention(query, key, value, *args, **kwargs).detach()
