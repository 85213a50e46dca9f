"""Prefill in Triton for any GPU."""
