"""Sampling of a model's attention calls, and writing of the sampled calls."""
