"""The causes: a file a family, each a function of a `Subject` that returns evidence or None."""
