"""The report: a single HTML file that needs no other files."""
