"""Child processes that kernels run in, in this Python environment and in others."""
