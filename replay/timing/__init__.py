"""How long kernels take, and on what machine."""
