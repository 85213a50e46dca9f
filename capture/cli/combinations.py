"""Which options of `capture` do not combine. Imports no torch."""

from __future__ import annotations

import argparse

JOBS = ("model", "show", "verify", "repair")
"""Arguments that say what to do."""

OF_EVERY_JOB = ("quiet", "verbose", "debug")


def misuse(arguments: argparse.Namespace) -> str:
    """Say in one sentence why the options do not combine; empty if they do."""
    jobs = [name for name in JOBS if getattr(arguments, name)]
    if len(jobs) > 1:
        named = " and ".join(f"--{name}" for name in jobs)
        return f"{named} are different jobs: give one of them"
    if arguments.stats and not arguments.show:
        return "--stats is about a recording: give --show DIR too"
    if not jobs:
        return "--model is required: cogvideo, flux, llama, a directory or file.py:function"
    (job,) = jobs
    for name in arguments.given:
        if job != "model" and name not in (*OF_EVERY_JOB, job, "stats"):
            option = name.replace("_", "-")
            return f"--{option} is about what is recorded: give --model, or leave it out"
    return ""
