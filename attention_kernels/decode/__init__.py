"""A few queries over a key/value cache."""
