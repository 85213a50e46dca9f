"""Calls spread over several devices, each of which is measured alone."""
