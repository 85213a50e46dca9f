"""Benchmarks of our own kernels."""
