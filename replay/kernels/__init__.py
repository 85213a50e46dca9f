"""Kernels, their limits, and the catalogue of all kernels."""
