"""Whole models run with kernels: predicted and measured speed-up, and drift."""
