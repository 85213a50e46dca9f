"""The child processes that run kernels, in this Python environment and in others."""
