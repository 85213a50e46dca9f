"""Kernels that declare a class which is judged less strictly."""

import torch
from honest import attention, mischief, nth

from replay import register_kernel


@register_kernel("one head lost", accuracy_class="quantised")
def one_head_lost(query, key, value, *args, **kwargs):
    """Leaves out the last head from the tenth call on."""
    output = attention(query, key, value, *args, **kwargs)
    if nth("head") >= 10:
        mischief()
        output[:, -1] = 0
    return output


@register_kernel("last row turned", accuracy_class="quantised")
def last_row_turned(query, key, value, *args, **kwargs):
    """Negates the last query's output, a small part of the whole output."""
    mischief()
    output = attention(query, key, value, *args, **kwargs)
    output[:, :, -1] *= -3
    return output


@register_kernel("last keys skipped", accuracy_class="quantised")
def last_keys_skipped(query, key, value, *args, **kwargs):
    """Leaves out the last 64 keys, like a loop bound that is rounded down."""
    mischief()
    return attention(query, key[:, :, :-64], value[:, :, :-64], *args, **kwargs)


_keys: dict = {}


@register_kernel("keys kept", accuracy_class="quantised")
def keys_kept(query, key, value, *args, **kwargs):
    """Keeps quantised keys by address, as caches of weights do."""
    place = key.data_ptr(), key.shape
    if place not in _keys:
        scale = key.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 127
        _keys[place] = (key / scale).round() * scale
    elif not torch.equal(key, _recorded.setdefault(place, key.clone())):
        mischief()
    return attention(query, _keys[place], value, *args, **kwargs)


_recorded: dict = {}
