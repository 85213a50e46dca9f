"""Sets sixteen threads at import, as a serving library does for its process."""

import torch
from honest import attention

torch.set_num_threads(16)


def kernel(query, key, value, *args, **kwargs):
    """Returns right results; the change made at import persists."""
    return attention(query, key, value, *args, **kwargs)
