"""The `capture` command and what it prints."""
