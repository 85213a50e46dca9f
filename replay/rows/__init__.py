"""The rows that a replay produces, one per kernel and call."""
