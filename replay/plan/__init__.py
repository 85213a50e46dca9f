"""The best kernel of every layer, within a budget of error."""
