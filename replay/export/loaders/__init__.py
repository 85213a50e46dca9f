"""Loaders, which `replay export` copies into its files. They import nothing of this package."""
