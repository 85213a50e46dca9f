"""Two runs of the same calls: what became faster, slower or wrong, and what is noise."""
