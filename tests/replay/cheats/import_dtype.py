"""Changes the default dtype at import, like a script's setup at module level."""

import torch
from honest import attention

torch.set_default_dtype(torch.float64)


def kernel(query, key, value, *args, **kwargs):
    """Returns right results; the change made at import persists."""
    return attention(query, key, value, *args, **kwargs)
