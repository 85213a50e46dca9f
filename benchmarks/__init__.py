"""What we claim about speed: each file is one command, each result a file in `results/`."""
