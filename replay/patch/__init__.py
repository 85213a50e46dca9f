"""Kernels put into a running model."""
