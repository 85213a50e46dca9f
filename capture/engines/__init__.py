"""Engines that serve language models: a run to record, and recording inside a running server."""
