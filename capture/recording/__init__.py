"""Takes a sample of the calls and writes it."""
