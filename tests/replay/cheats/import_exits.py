"""Ends the process at import, like a script without a main guard."""

import sys

sys.exit(0)


def kernel(query, key, value, *args, **kwargs):
    """Is never called."""
    return query
