"""The public functions: one procedure a file, which the command line calls too."""
