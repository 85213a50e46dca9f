"""Results for people: tables on a terminal."""

METRICS = ("time", "throughput", "bandwidth", "arithmetic_intensity", "accuracy", "memory", "all")
"""What `--metric` chooses columns by."""
