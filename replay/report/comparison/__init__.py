"""Comparison of two runs, formatted as plain text and as Markdown."""
