"""Command-line helpers that `capture` and `replay` share. Does not import torch."""
