"""Public functions, one per module; the command line uses them too."""
