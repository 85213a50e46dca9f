"""Calls to replay: recorded calls, random shapes, and published lists of shapes."""
