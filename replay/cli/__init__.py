"""The `replay` command: from arguments to an exit code."""
