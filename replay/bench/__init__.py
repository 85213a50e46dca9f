"""The replay of a kernel on a call: check it, time it, check it again, and make a row."""
