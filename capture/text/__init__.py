"""Formatting of numbers, names and tables for both commands."""
