"""Captures in progress, for tests of their later states."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from capture.call.attention_call import AttentionCall
from capture.storage.call_file import PackedCall
from capture.storage.capture_record import CaptureRecord
from capture.storage.journal import Journal
from capture.storage.target import CaptureTarget

MakeCall = Callable[..., AttentionCall]


@pytest.fixture
def started(make_call: MakeCall) -> Callable[..., tuple[CaptureTarget, Journal]]:
    """`started(directory, model, indices)` starts a capture with these calls."""

    def start(
        directory: Path, model: str, indices: range, *, overwrite: bool = False, began: str = ""
    ) -> tuple[CaptureTarget, Journal]:
        target = CaptureTarget.check(directory, model, overwrite=overwrite)
        journal = target.begin(CaptureRecord(model, "random", started=began))
        for index in indices:
            call = PackedCall.of(make_call(model=model, call_index=index))
            path = directory / f"{journal.stem}-{index:06d}.safetensors"
            journal.append(sampled=index)
            journal.append(**call.write(path).to_json())
        return target, journal

    return start
