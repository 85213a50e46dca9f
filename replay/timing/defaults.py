"""The default numbers and durations. Imports no torch, because `--help` shows them."""

from __future__ import annotations

ROUNDS = 30
"""Samples of a kernel on a call."""

MINIMUM_ROUNDS = 6
"""Least rounds of a slow kernel, however long they take; fewer have no 95 % interval."""

SECONDS = 20.0
"""Time for the samples of one kernel on one call; a slow kernel gets fewer rounds."""

CPU_SECONDS = 1.0
"""The same on a CPU, where calls are slow."""

CALLS_BEFORE_IN_MODELS = 4
"""Untimed calls before each sample when times on a GPU are to predict a model's."""
