"""Names of the ways that ranks of a distributed model share a call. Imports no torch."""

from __future__ import annotations

SPLITS = ("heads", "queries")
"""Dimensions by which ranks divide a call. With `heads` (tensor parallel, or Ulysses after its
all-to-all) each rank has all tokens of some heads; with `queries` it has some queries and all
keys."""
