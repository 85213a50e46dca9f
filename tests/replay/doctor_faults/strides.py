"""Kernels that are right for dense (B, H, S, D) memory, and ignore a stride of other tensors."""

import torch
from arguments import attend, with_sdpa_signature
from torch import Tensor


def _read(tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
    """Read a tensor's memory with other strides; beyond its end are its numbers backwards."""
    last = sum(stride * (n - 1) for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    places = torch.zeros((), dtype=torch.int64)
    for size, stride in zip(tensor.shape, strides, strict=True):
        places = places[..., None] + torch.arange(size) * stride
    memory = tensor.as_strided((last + 1,), (1,))
    return torch.cat((memory, memory.flip(0)))[places % (2 * last + 2)]


def _dense(tensor: Tensor) -> tuple[int, ...]:
    _, heads, length, width = tensor.shape
    return heads * length * width, length * width, width, 1


@with_sdpa_signature
def value_taken_for_dense(query, key, value, attn_mask, is_causal, scale) -> Tensor:
    """Honours the strides of query and key, and takes the value for dense."""
    return attend(query, key, _read(value, _dense(value)), attn_mask, is_causal, scale)


@with_sdpa_signature
def expanded_heads_advance(query, key, value, attn_mask, is_causal, scale) -> Tensor:
    """Steps S rows ahead for each head, although expanded heads share their memory."""

    def read(tensor: Tensor) -> Tensor:
        batch, head, row, channel = tensor.stride()
        return _read(tensor, (batch, head or tensor.shape[2] * row, row, channel))

    return attend(query, read(key), read(value), attn_mask, is_causal, scale)


@with_sdpa_signature
def channels_taken_for_adjacent(query, key, value, attn_mask, is_causal, scale) -> Tensor:
    """Takes a row's stride from the tensor, and 1 for the stride of its channels."""
    key = _read(key, (*key.stride()[:3], 1))
    return attend(query, key, value, attn_mask, is_causal, scale)


@with_sdpa_signature
def output_like_the_query(query, key, value, attn_mask, is_causal, scale) -> Tensor:
    """Fills `empty_like(query)`, which has the query's strides, as if it were dense."""
    output = torch.empty_like(query)
    memory = output.as_strided((output.numel(),), (1,))
    memory.copy_(attend(query, key, value, attn_mask, is_causal, scale).flatten())
    return output


@with_sdpa_signature
def cache_taken_for_full(query, key, value, attn_mask, is_causal, scale) -> Tensor:
    """Computes a head's address from the cache's filled length instead of its capacity."""
    if query.shape[2] == 1 and key.stride(2) == key.shape[3]:
        key, value = _read(key, _dense(key)), _read(value, _dense(value))
    return attend(query, key, value, attn_mask, is_causal, scale)
