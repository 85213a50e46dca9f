"""Sixteen threads from import on, as a serving library decides for its process."""

import torch
from honest import attention

torch.set_num_threads(16)


def kernel(query, key, value, *args, **kwargs):
    """Right results; what happened at import stays."""
    return attention(query, key, value, *args, **kwargs)
