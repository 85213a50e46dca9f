"""Stages that a replay reports as progress. Imports no torch."""

LOADING = "loading the call"
REFERENCE = "computing the reference"
TIMING = "preparing to time"
DONE = "done"
FIRST_CALLS = "first calls"
FIRST_CALLS_DONE = "waiting for its turn"
STAGES = (LOADING, REFERENCE, TIMING, DONE, FIRST_CALLS, FIRST_CALLS_DONE)
"""Stages that are reported as progress while no kernel runs; a running kernel is named instead."""
