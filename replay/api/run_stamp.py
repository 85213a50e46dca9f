"""Date and commit of a run, which its rows keep."""

from __future__ import annotations

import os
import subprocess
from datetime import datetime, timezone
from typing import NamedTuple

LENGTH = 7
"""Number of characters of a commit that GitHub Actions names."""


class RunStamp(NamedTuple):
    """Beginning of a run in UTC (ISO 8601), and the commit of the current directory."""

    measured_at: str
    commit: str

    @staticmethod
    def now() -> RunStamp:
        """Return the stamp of a run that begins here and now."""
        return RunStamp(datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"), commit_here())


def commit_here() -> str:
    """Return the commit of the current directory, with `+` if a tracked file has changed.

    Without Git, it is the commit that GitHub Actions names, or else empty.
    """
    commit = _git("rev-parse", "--short", "HEAD")
    if commit:
        changed = _git("status", "--porcelain", "--untracked-files=no")
        return f"{commit}+" if changed else commit
    return os.environ.get("GITHUB_SHA", "")[:LENGTH]


def _git(*arguments: str) -> str:
    """Return what Git prints; empty if it fails or is not installed."""
    try:
        done = subprocess.run(
            ("git", *arguments), capture_output=True, text=True, check=False, errors="replace"
        )
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
