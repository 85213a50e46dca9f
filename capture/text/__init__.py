"""Numbers, names and tables as both commands print them."""
