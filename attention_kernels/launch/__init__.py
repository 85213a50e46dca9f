"""The host's side of a launch."""
