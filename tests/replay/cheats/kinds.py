"""Kernels that return another kind of output from the fifth call on."""

import torch
from honest import attention, empty, mischief, nth


def _from_fifth(name, query, key, value, args, kwargs, other):
    output = attention(query, key, value, *args, **kwargs)
    if nth(name) < 5:
        return output
    mischief()
    return other(output)


def float64(query, key, value, *args, **kwargs):
    """Returns float64, like a fallback path that forgets to convert back."""
    return _from_fifth("double", query, key, value, args, kwargs, torch.Tensor.double)


def bshd(query, key, value, *args, **kwargs):
    """Swaps heads and queries, like a fast path that ignores a layout flag."""

    def exchanged(output):
        return output.transpose(1, 2)

    return _from_fifth("bshd", query, key, value, args, kwargs, exchanged)


def odd_strides(query, key, value, *args, **kwargs):
    """Returns right values; from the fifth call on, the head dimension is outermost in memory."""

    def outermost(output):
        return output.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0)

    output = attention(query, key, value, *args, **kwargs)
    return output if nth("strides") < 5 else outermost(output)


def requires_grad(query, key, value, *args, **kwargs):
    """Returns a tensor that requires a gradient, which keeps the inputs alive."""
    return _from_fifth("grad", query, key, value, args, kwargs, torch.Tensor.requires_grad_)


def negative_view(query, key, value, *args, **kwargs):
    """Returns a lazily negated view, whose memory has the wrong sign."""

    def negated(output):
        return torch._neg_view(output.neg())

    return _from_fifth("neg", query, key, value, args, kwargs, negated)


def sparse(query, key, value, *args, **kwargs):
    """Returns a sparse tensor."""
    return _from_fifth("sparse", query, key, value, args, kwargs, torch.Tensor.to_sparse)


def meta(query, key, value, *args, **kwargs):
    """Returns a meta tensor, like shape propagation mistaken for a call."""
    if nth("meta") < 5:
        return attention(query, key, value, *args, **kwargs)
    mischief()
    return torch.empty(*query.shape[:-1], value.shape[-1], dtype=query.dtype, device="meta")


def with_statistics(query, key, value, *args, **kwargs):
    """Returns output and log-sum-exp, as flash-attn does if a flag requests both."""
    return _from_fifth("pair", query, key, value, args, kwargs, lambda output: (output, None))


def nothing(query, key, value, *args, **kwargs):
    """Returns None, like a function that expects an output argument."""
    if nth("none") < 5:
        return attention(query, key, value, *args, **kwargs)
    mischief()
    return None


def one_row(query, key, value, *args, **kwargs):
    """Returns one row, which broadcasts against the reference, from the fifth call on."""
    if nth("row") < 5:
        return attention(query, key, value, *args, **kwargs)
    mischief()
    return empty(query[:, :, :1], value).zero_()


def the_query(query, key, value, *args, **kwargs):
    """Returns the query itself, like an identity processor that was left in."""
    if nth("query") < 5:
        return attention(query, key, value, *args, **kwargs)
    mischief()
    return query


@torch.inference_mode()
def in_inference_mode(query, key, value, *args, **kwargs):
    """Returns right results as inference tensors."""
    return attention(query, key, value, *args, **kwargs)
