"""Whole models with kernels in place: predicted and measured speed-up, and drift."""
