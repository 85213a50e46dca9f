"""Whole models with kernels put back: speed-up predicted and measured, and the output."""
