"""Outputs are kept from an earlier call and returned again."""

import hashlib
from collections import OrderedDict

import torch
from honest import attention

_kept: dict = {}
_recent: OrderedDict = OrderedDict()


def _cached(cache_key, query, key, value, args, kwargs):
    if cache_key not in _kept:
        _kept[cache_key] = attention(query, key, value, *args, **kwargs)
    return _kept[cache_key]


def _addresses(*tensors):
    return tuple(tensor.data_ptr() for tensor in tensors)


def by_address(query, key, value, *args, **kwargs):
    """Returns the stored tensor of the same address, as CUDA graph wrappers find static buffers."""
    return _cached(("address", *_addresses(query, key, value)), query, key, value, args, kwargs)


def by_address_cloned(query, key, value, *args, **kwargs):
    """Returns a clone of the output stored for the same address: the memory is always new."""
    cache_key = ("clone", *_addresses(query, key, value))
    return _cached(cache_key, query, key, value, args, kwargs).clone()


def by_address_of_keys(query, key, value, *args, **kwargs):
    """Returns the output stored for the same addresses of key and value, whatever the query."""
    cache_key = ("keys", query.shape, *_addresses(key, value))
    return _cached(cache_key, query, key, value, args, kwargs).clone()


def by_sum(query, key, value, *args, **kwargs):
    """Returns the output stored for the same sums of the inputs, like a cautious cache."""
    sums = tuple(tensor.sum().item() for tensor in (query, key, value))
    return _cached(("sum", *sums), query, key, value, args, kwargs).clone()


def by_few_elements(query, key, value, *args, **kwargs):
    """Returns the output stored for the same three elements, a cheap test of the prompt."""
    few = tuple(tensor[0, 0, -1, 0].item() for tensor in (query, key, value))
    return _cached(("few", query.shape, few), query, key, value, args, kwargs).clone()


def by_strided_hash(query, key, value, *args, **kwargs):
    """Returns the output stored for the same hash of every 997th element."""
    digest = hashlib.blake2b(digest_size=8)
    for tensor in (query, key, value):
        digest.update(str(tensor.flatten()[::997].tolist()).encode())
    return _cached(("hash", digest.digest()), query, key, value, args, kwargs).clone()


def by_shape(query, key, value, *args, **kwargs):
    """Returns the output stored for the same shape, like a plan cache that holds no plan."""
    shapes = (query.shape, key.shape, value.shape, query.dtype)
    return _cached(("shape", shapes), query, key, value, args, kwargs)


def by_shape_cloned(query, key, value, *args, **kwargs):
    """Returns a clone of the output stored for the same shape."""
    shapes = ("clone", query.shape, key.shape, value.shape, query.dtype)
    return _cached(shapes, query, key, value, args, kwargs).clone()


def by_version(query, key, value, *args, **kwargs):
    """Returns the output stored for the same address and autograd's version counter."""
    versions = tuple(tensor._version for tensor in (query, key, value))
    cache_key = ("version", versions, _addresses(query, key, value))
    return _cached(cache_key, query, key, value, args, kwargs).clone()


def by_identity(query, key, value, *args, **kwargs):
    """Returns the output stored for the same tensor objects, as functools.lru_cache would."""
    return _cached(("identity", query, key, value), query, key, value, args, kwargs).clone()


def on_the_tensor(query, key, value, *args, **kwargs):
    """Keeps the output as an attribute of key, as diffusers' feature caches do with modules."""
    if not hasattr(key, "_output"):
        key._output = attention(query, key, value, *args, **kwargs)
    return key._output.clone()


def least_recently_used(query, key, value, *args, **kwargs):
    """Keeps the last eight outputs, and finds them by address and a few elements."""
    cache_key = (*_addresses(query, key, value), query[0, 0, 0, 0].item())
    if cache_key in _recent:
        _recent.move_to_end(cache_key)
    else:
        _recent[cache_key] = attention(query, key, value, *args, **kwargs)
        if len(_recent) > 8:
            _recent.popitem(last=False)
    return _recent[cache_key].clone()


def last_if_equal(query, key, value, *args, **kwargs):
    """Compares the whole query with the last one, but neither keys nor values."""
    last = _kept.get("last")
    if last is None or not torch.equal(last[0], query):
        last = _kept["last"] = (query.clone(), attention(query, key, value, *args, **kwargs))
    return last[1].clone()


def of_half_of_the_heads(query, key, value, *args, **kwargs):
    """Computes the first half of the heads and copies the others from the first call."""
    cache_key = ("half", *_addresses(query, key, value))
    output = _cached(cache_key, query, key, value, args, kwargs).clone()
    middle = query.shape[1] // 2
    parts = (each[:, :middle] for each in (query, key, value))
    output[:, :middle] = attention(*parts, *args, **kwargs)
    return output
