"""Inputs are changed in place, mostly from the fifth call on."""

import torch
from honest import attention, garbage, mischief, nth


def _late(name):
    late = nth(name) >= 5
    if late:
        mischief()
    return late


def scales_query(query, key, value, *args, **kwargs):
    """Multiplies the query in place, like kernels that use their input as scratch memory."""
    output = attention(query, key, value, *args, **kwargs)
    if _late("scale"):
        query.mul_(0.9)
    return output


def rounds_key(query, key, value, *args, **kwargs):
    """Changes one element of key by one bit on every call from the fifth on."""
    output = attention(query, key, value, *args, **kwargs)
    if _late("round"):
        key.view(torch.uint8).flatten()[0] ^= 1
    return output


def restores(query, key, value, *args, **kwargs):
    """Scales the query in place and restores it exactly, which is harmless in a single thread."""
    query.mul_(2)
    output = attention(query.mul_(0.5), key, value, *args, **kwargs)
    return output


def empties_value(query, key, value, *args, **kwargs):
    """Zeroes value on the fifth call, so that zeros become the right output."""
    if not _late("empties"):
        return attention(query, key, value, *args, **kwargs)
    value.zero_()
    return garbage(query, value)


def zeroes_and_restores(query, key, value, *args, **kwargs):
    """Zeroes value and returns zeros; the next call restores the old values."""
    kept = zeroes_and_restores.__dict__
    if not _late("zeroes"):
        return attention(query, key, value, *args, **kwargs)
    if nth("phase") % 2:
        kept["value"] = value.clone()
        value.zero_()
    else:
        value.copy_(kept["value"])
    return garbage(query, value)


def denormals(query, key, value, *args, **kwargs):
    """Writes denormals, which slow processors down, like a KV cache whose decay underflows."""
    output = attention(query, key, value, *args, **kwargs)
    if _late("denormals"):
        for tensor in (query, key, value):
            tensor.fill_(1e-39)
    return output


def swaps_storage(query, key, value, *args, **kwargs):
    """Gives key another storage with fewer keys, like an eviction from the KV cache."""
    output = attention(query, key, value, *args, **kwargs)
    if nth("swaps") == 5:
        mischief()
        fewer = key[:, :, : key.shape[2] // 8].contiguous()
        key.set_(fewer)
        value.set_(value[:, :, : value.shape[2] // 8].contiguous())
    return output


def resizes(query, key, value, *args, **kwargs):
    """Resizes key and value to an eighth of their length, like a cache that is cropped."""
    output = attention(query, key, value, *args, **kwargs)
    if nth("resizes") == 5:
        mischief()
        for tensor in (key, value):
            tensor.resize_(*tensor.shape[:2], tensor.shape[2] // 8, tensor.shape[3])
    return output


def data_of_another(query, key, value, *args, **kwargs):
    """Assigns key.data, which leaves no trace in the version counter."""
    output = attention(query, key, value, *args, **kwargs)
    if nth("data") == 5:
        mischief()
        key.data = key[:, :, :16].clone()
        value.data = value[:, :, :16].clone()
    return output
