"""Decode that reads a choice of tokens."""
