"""Names of the dimensions by which ranks share a call. Does not import torch."""

from __future__ import annotations

SPLITS = ("heads", "queries")
"""Dimensions by which ranks divide a call. With `heads` (tensor parallel, or Ulysses after its
all-to-all), each rank has all tokens of some heads. With `queries`, each rank has some queries and
all keys."""
