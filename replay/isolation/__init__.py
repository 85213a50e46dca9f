"""The protection of measurements: perturbed inputs, restored state, trusted functions, a judge."""
