"""`python -m replay`."""

from replay.cli.main import main

main()
