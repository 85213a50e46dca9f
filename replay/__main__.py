"""Entry point of `python -m replay`, the `replay` command."""

from replay.cli.main import main

main()
