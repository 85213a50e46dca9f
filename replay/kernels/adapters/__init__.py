"""Adapters of kernels, one file per library; each file registers its kernels."""
