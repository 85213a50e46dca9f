"""Errors of an output against the reference, and the verdict whether they are too large."""
