"""A kernel's failure on a recorded call, made small and shown without this project."""
