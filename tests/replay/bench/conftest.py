"""Fixtures that run kernels on one call in this process and return their rows."""

from dataclasses import replace
from typing import Any

import pytest

from capture.call.attention_call import AttentionCall
from replay.bench.settings import Settings
from replay.kernels.registry import Kernel
from replay.rows.row import Row
from tests.replay.bench.small_kernels import MakeWorkload, Replayed, rows_of


@pytest.fixture
def replayed(workload: MakeWorkload, quick: Settings) -> Replayed:
    """`replayed(call, kernel, …, energy=True)` returns rows by kernel; keywords set `Settings`."""

    def run(call: AttentionCall, *kernels: Kernel, **settings: Any) -> dict[str, Row]:
        return rows_of(call, workload, replace(quick, **settings), *kernels)

    return run
