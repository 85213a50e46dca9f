"""Puts kernels back into the model: how fast it becomes, predicted and measured, and what changes
in its output."""
