"""Command line of `capture` and its output."""
