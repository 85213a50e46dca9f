"""The default numbers and durations of timing. Imports no torch, so that `--help` stays fast."""

from __future__ import annotations

ROUNDS = 30
"""Number of samples of each kernel on each call."""

MINIMUM_ROUNDS = 6
"""Minimum number of rounds for a slow kernel; with fewer rounds there is no 95 % interval."""

SECONDS = 20.0
"""Time limit for the samples of one kernel on one call; a slow kernel gets fewer rounds."""

CPU_SECONDS = 1.0
"""Time limit for the samples of one kernel on one call on a CPU, where calls are slow."""

CALLS_BEFORE_IN_MODELS = 4
"""Number of untimed calls before each sample, when GPU times are to predict a model's time."""
