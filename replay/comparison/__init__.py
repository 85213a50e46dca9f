"""Comparison of two runs of the same calls: changes in speed and accuracy beyond noise."""
