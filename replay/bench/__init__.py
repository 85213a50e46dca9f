"""The replay of one kernel on one call, in this process: check, time, check again, make a row."""
