"""Benchmarks behind our published figures: one command per file, results in `results/`."""
