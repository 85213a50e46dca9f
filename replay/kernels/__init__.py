"""What a kernel is, what it can run, and every kernel there is."""
