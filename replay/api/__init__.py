"""Public functions, one procedure per file; the command line uses them too."""
