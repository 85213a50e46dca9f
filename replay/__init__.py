"""Replay recorded attention calls through every kernel: how fast, how accurate, which to run."""
