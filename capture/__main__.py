"""`python -m capture`."""

from capture.cli.main import main

main()
