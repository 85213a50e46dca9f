"""Hypotheses about causes, one file per family: functions from a `Subject` to evidence or None."""
