"""Kernels whose outputs change in kind from the fifth call on."""

import torch
from honest import attention, empty, mischief, nth


def _from_fifth(name, query, key, value, args, kwargs, other):
    output = attention(query, key, value, *args, **kwargs)
    if nth(name) < 5:
        return output
    mischief()
    return other(output)


def float64(query, key, value, *args, **kwargs):
    """float64: a fallback path that forgets to convert back."""
    return _from_fifth("double", query, key, value, args, kwargs, torch.Tensor.double)


def bshd(query, key, value, *args, **kwargs):
    """Swaps heads and queries: a layout flag lost in a fast path."""

    def exchanged(output):
        return output.transpose(1, 2)

    return _from_fifth("bshd", query, key, value, args, kwargs, exchanged)


def odd_strides(query, key, value, *args, **kwargs):
    """Right values with the head dimension outermost, unlike the first call."""

    def outermost(output):
        return output.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0)

    output = attention(query, key, value, *args, **kwargs)
    return output if nth("strides") < 5 else outermost(output)


def requires_grad(query, key, value, *args, **kwargs):
    """Requires a gradient, which keeps the inputs alive."""
    return _from_fifth("grad", query, key, value, args, kwargs, torch.Tensor.requires_grad_)


def negative_view(query, key, value, *args, **kwargs):
    """A lazily negated view, whose memory has the wrong sign."""

    def negated(output):
        return torch._neg_view(output.neg())

    return _from_fifth("neg", query, key, value, args, kwargs, negated)


def sparse(query, key, value, *args, **kwargs):
    """A sparse layout."""
    return _from_fifth("sparse", query, key, value, args, kwargs, torch.Tensor.to_sparse)


def meta(query, key, value, *args, **kwargs):
    """A tensor without memory: shape propagation mistaken for a call."""
    if nth("meta") < 5:
        return attention(query, key, value, *args, **kwargs)
    mischief()
    return torch.empty(*query.shape[:-1], value.shape[-1], dtype=query.dtype, device="meta")


def with_statistics(query, key, value, *args, **kwargs):
    """A pair of output and log-sum-exp, as flash-attn returns by flag."""
    return _from_fifth("pair", query, key, value, args, kwargs, lambda output: (output, None))


def nothing(query, key, value, *args, **kwargs):
    """None: an output argument was expected."""
    if nth("none") < 5:
        return attention(query, key, value, *args, **kwargs)
    mischief()
    return None


def one_row(query, key, value, *args, **kwargs):
    """One row that broadcasts against the reference, from the fifth call on."""
    if nth("row") < 5:
        return attention(query, key, value, *args, **kwargs)
    mischief()
    return empty(query[:, :, :1], value).zero_()


def the_query(query, key, value, *args, **kwargs):
    """The query itself: an identity processor that was left in."""
    if nth("query") < 5:
        return attention(query, key, value, *args, **kwargs)
    mischief()
    return query


@torch.inference_mode()
def in_inference_mode(query, key, value, *args, **kwargs):
    """An honest kernel that returns inference tensors."""
    return attention(query, key, value, *args, **kwargs)
