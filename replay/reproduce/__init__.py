"""Reproductions: a kernel's failure on a recorded call, reduced and shown without this project."""
