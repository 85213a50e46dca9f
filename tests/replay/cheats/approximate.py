"""Kernels that do less work than requested."""

import torch
from honest import attention, mischief, nth

_kept: dict = {}


def fewer_keys_when_long(query, key, value, *args, **kwargs):
    """Attends to at most the last 1024 keys, like a sliding window that was left on."""
    if key.shape[2] <= 1024:
        return attention(query, key, value, *args, **kwargs)
    mischief()
    return attention(query, key[:, :, -1024:], value[:, :, -1024:], *args, **kwargs)


def bfloat16_inside(query, key, value, *args, **kwargs):
    """Computes in bfloat16 whatever the input's dtype, like a forgotten autocast region."""
    if query.dtype == torch.bfloat16:
        return attention(query, key, value, *args, **kwargs)
    mischief()
    half = (tensor.bfloat16() for tensor in (query, key, value))
    return attention(*half, *args, **kwargs).to(query.dtype)


def bfloat16_later(query, key, value, *args, **kwargs):
    """Computes in bfloat16 from the fifth call on."""
    if query.dtype == torch.bfloat16 or nth("bf16") < 5:
        return attention(query, key, value, *args, **kwargs)
    mischief()
    half = (tensor.bfloat16() for tensor in (query, key, value))
    return attention(*half, *args, **kwargs).to(query.dtype)


def half_of_keys_later(query, key, value, *args, **kwargs):
    """Attends to every other key from the tenth call on, like a cache that is thinned out."""
    if nth("half") < 10:
        return attention(query, key, value, *args, **kwargs)
    mischief()
    return attention(query, key[:, :, ::2], value[:, :, ::2], *args, **kwargs)


def top_keys_later(query, key, value, *args, **kwargs):
    """Attends only to the mean query's 32 best keys, from the tenth call on."""
    if nth("top") < 10:
        return attention(query, key, value, *args, **kwargs)
    mischief()
    scores = (key @ query.mean(2, keepdim=True).transpose(-1, -2)).squeeze(-1)
    best = scores.topk(min(32, key.shape[2])).indices[..., None]
    keys = key.gather(2, best.expand(-1, -1, -1, key.shape[3]))
    values = value.gather(2, best.expand(-1, -1, -1, value.shape[3]))
    return attention(query, keys, values)


def low_rank_later(query, key, value, *args, **kwargs):
    """Averages keys and values in groups of eight (Linformer) from the tenth call on."""
    if nth("rank") < 10 or key.shape[2] % 8:
        return attention(query, key, value, *args, **kwargs)
    mischief()
    keys = key.unflatten(2, (-1, 8)).mean(3)
    return attention(query, keys, value.unflatten(2, (-1, 8)).mean(3))


def last_tile_skipped(query, key, value, *args, **kwargs):
    """Leaves out the last 64 keys, like a loop bound that is rounded down."""
    mischief()
    return attention(query, key[:, :, :-64], value[:, :, :-64], *args, **kwargs)


def last_keys_skipped(query, key, value, *args, **kwargs):
    """Leaves out the last key, which affects only one row in many."""
    mischief()
    return attention(query, key[:, :, :-1], value[:, :, :-1], *args, **kwargs)


def random_rows(query, key, value, *args, **kwargs):
    """Computes one row in eight; the other rows keep the output of earlier calls."""
    if query.shape[2] < 8:
        return attention(query, key, value, *args, **kwargs)
    buffer = _kept.get(("rows", query.shape))
    if buffer is None:
        buffer = attention(query, key, value, *args, **kwargs)
        _kept["rows", query.shape] = buffer
        return buffer.clone()
    mischief()
    rows = torch.randperm(query.shape[2])[: query.shape[2] // 8]
    buffer[:, :, rows] = attention(query[:, :, rows], key, value)
    return buffer.clone()


def one_head_a_call(query, key, value, *args, **kwargs):
    """Computes one head per call, in turn; the other heads keep the output of earlier calls."""
    buffer = _kept.get(("heads", query.shape, key.shape))
    if buffer is None:
        buffer = attention(query, key, value, *args, **kwargs)
        _kept["heads", query.shape, key.shape] = buffer
        return buffer.clone()
    mischief()
    head = nth("heads") % query.shape[1]
    one = slice(head, head + 1)
    buffer[:, one] = attention(query[:, one], key[:, one], value[:, one])
    return buffer.clone()
