"""A comparison of two runs for people: as text, Markdown and a page of HTML."""
