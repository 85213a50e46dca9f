"""Plans: the fastest kernel for every layer within an error budget."""
