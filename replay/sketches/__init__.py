"""Foretelling of the final output's error for any plan, from a few runs with gradients."""
