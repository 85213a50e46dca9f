"""Tuning: quality of a run's output, and the search for the fastest plan within a budget."""
