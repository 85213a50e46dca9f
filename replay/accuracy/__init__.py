"""Errors of an output against the reference, and verdicts on them."""
