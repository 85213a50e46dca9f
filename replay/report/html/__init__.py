"""The HTML report, a single file that needs no other files."""
