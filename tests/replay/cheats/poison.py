"""Work is done only where fresh memory holds a checker's poison."""

import torch
from honest import attention, empty, mischief

_known: dict = {}


def _stale(output):
    mischief()
    return output


def only_over_nan(query, key, value, *args, **kwargs):
    """Computes only where the output's memory starts with NaN, as if to skip finished work."""
    output = empty(query, value)
    if output.flatten()[:8].isnan().any():
        return output.copy_(attention(query, key, value, *args, **kwargs))
    return _stale(output)


def only_over_any_nan(query, key, value, *args, **kwargs):
    """Computes only if one of three fresh blocks holds NaN: a reused block may hide poison."""
    blocks = [empty(query, value) for _ in range(3)]
    if any(block.flatten()[::64].isnan().any() for block in blocks):
        return attention(query, key, value, *args, **kwargs)
    return _stale(blocks[0])


def only_over_changed_memory(query, key, value, *args, **kwargs):
    """Computes unless fresh memory still holds the last output's first elements."""
    output = empty(query, value)
    shape = output.shape
    if shape in _known and torch.equal(output.flatten()[:32], _known[shape]):
        return _stale(output)
    output.copy_(attention(query, key, value, *args, **kwargs))
    _known[shape] = output.flatten()[:32].clone()
    return output


def half_over_stale(query, key, value, *args, **kwargs):
    """Computes only the first head where the rest of the memory looks written."""
    output = empty(query, value)
    if output[:, 1:].flatten()[::512].isnan().any() or (output[:, -1, -1] == 0).any():
        return output.copy_(attention(query, key, value, *args, **kwargs))
    output[:, :1] = attention(query[:, :1], key[:, :1], value[:, :1], *args, **kwargs)
    return _stale(output)
