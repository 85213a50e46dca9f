"""How far an output is from the reference, and whether that is too far."""
