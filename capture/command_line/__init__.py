"""Command-line helpers that `capture` and `replay` share. Imports no torch."""
