"""The `replay` command, which turns arguments into actions and an exit code."""
