"""Runs kernels inside a live model."""
