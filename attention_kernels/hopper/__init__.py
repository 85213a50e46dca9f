"""Prefill in Gluon for Hopper GPUs."""
