"""Comparison of two runs of the same calls: changes in speed and correctness, told from noise."""
