"""Replaces SDPA at import by a function that takes twice as long."""

import torch
from honest import attention

_sdpa = torch.nn.functional.scaled_dot_product_attention


def _twice(*args, **kwargs):
    _sdpa(*args, **kwargs)
    return _sdpa(*args, **kwargs)


torch.nn.functional.scaled_dot_product_attention = _twice


def kernel(query, key, value, *args, **kwargs):
    """Returns right results; the change made at import persists."""
    return attention(query, key, value, *args, **kwargs)
