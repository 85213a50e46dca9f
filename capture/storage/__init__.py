"""Writing, reading and checking of the format on disk."""
