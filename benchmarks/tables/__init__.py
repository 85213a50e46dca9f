"""The tables in the docs, made from `benchmarks/results/` and from what the code declares."""
