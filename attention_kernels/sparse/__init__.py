"""Decode over chosen tokens."""
