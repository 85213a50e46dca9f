"""Record the attention inputs a real model produces, replay them, and choose a kernel."""

from attention_replay.errors import Error

__all__ = ["Error", "__version__"]
__version__ = "0.1.0"
