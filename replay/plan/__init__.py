"""The fastest kernel for every layer within an error budget."""
