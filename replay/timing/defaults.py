"""How long and how often, where nobody says. Imports no torch: `--help` states these."""

from __future__ import annotations

ROUNDS = 30
"""Samples of a kernel on a call."""

MINIMUM_ROUNDS = 6
"""Of a slow kernel, however long they take: fewer have no interval of 95 %."""

SECONDS = 20.0
"""Time for the samples of one kernel on one call; a slow kernel gets fewer rounds."""

CPU_SECONDS = 1.0
"""The same on a CPU, where calls take long and people wait."""

CALLS_BEFORE_IN_MODELS = 4
"""Untimed calls before each sample where a GPU's times are to predict a model's."""
