"""One kernel on one call makes one row: check it, time it, check it again."""
