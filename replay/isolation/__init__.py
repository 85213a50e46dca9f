"""Protection of rows: perturbed inputs, restored process state, trusted functions, a judge."""
