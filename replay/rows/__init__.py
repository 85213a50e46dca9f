"""Rows, the results of a replay, one per kernel and call."""
