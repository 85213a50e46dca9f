"""Detection of the attention calls of a running model."""
