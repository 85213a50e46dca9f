"""What a replay produces: one row per kernel and call."""
