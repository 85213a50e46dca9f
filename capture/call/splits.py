"""How ranks of a distributed model share an attention call. Imports no torch."""

from __future__ import annotations

SPLITS = ("heads", "queries")
"""By its heads (tensor parallel, or Ulysses, whose all-to-all gives each rank all tokens of some
heads), or by its queries, of which each rank has some, and all the keys."""
