"""Copies of recordings for others: chosen calls, a dataset card, and a benchmark file."""
