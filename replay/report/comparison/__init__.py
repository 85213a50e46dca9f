"""A comparison of two runs for people: as text and as Markdown."""
