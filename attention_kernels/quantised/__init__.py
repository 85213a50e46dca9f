"""Prefill with 8-bit operands."""
