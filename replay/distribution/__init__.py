"""Calls spread over several devices, with one call at a time on each."""
