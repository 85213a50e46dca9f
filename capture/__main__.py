"""`python -m capture`."""

from capture.cli import main

main()
