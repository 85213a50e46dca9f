"""Finds the attention calls of a running model."""
