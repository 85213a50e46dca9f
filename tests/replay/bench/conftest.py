"""A clock that makes the number of calls known."""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace

import pytest

CHECKED = 3
WARMING_UP = 18
"""Calls of a kernel before it is timed, in samples of two, where `known_calls` is used."""


@pytest.fixture
def known_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call takes 61 µs, by the only clock that the timer has."""
    looks = count()
    clock = SimpleNamespace(perf_counter=lambda: next(looks) * 2.0**-14)
    monkeypatch.setattr("replay.timing.timer.time", clock)
