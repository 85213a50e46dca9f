"""Comparison of two runs, written for people as text and as Markdown."""
