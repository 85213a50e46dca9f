"""Run kernels inside a live model."""
