"""Attention's share of the forward time, by a clock that the tests advance."""

from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

from capture.hooks import attention_share
from capture.hooks.attention_share import AttentionShare
from capture.hooks.batch_phase import prepared
from capture.hooks.modules import CallSite, ModuleTracker
from capture.hooks.phases import RECOMPUTE
from capture.storage.capture_record import CaptureRecord
from tests.capture.recording.callers import attend, recorded


class Passes:
    """Forward passes of one module, with given seconds of attention and of everything else."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(attention_share, "_now", lambda: self.now)
        tracker = ModuleTracker({"": nn.Linear(1, 1)})
        self.watched, self.share = tracker.watched[0], AttentionShare(tracker)

    def run(self, *attention: float, others: float, phase: str = "denoise") -> None:
        """Run a pass in which recording takes a further 100 seconds for each call."""
        self.share.enter(self.watched, CallSite(phase=phase))
        self.now += others
        for seconds in attention:
            for each in (0.0, seconds, 100.0):
                self.now += each
                self.share.mark()
        self.share.leave()


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Passes:
    return Passes(monkeypatch)


def test_first_pass_counts_only_without_later_ones(passes: Passes) -> None:
    assert passes.share.share() is None
    passes.run(1, others=3)
    assert passes.share.share() == 0.25
    passes.run(3, others=1)
    assert passes.share.share() == 0.75


def test_first_call_of_a_lone_pass_counts_without_its_compilation(passes: Passes) -> None:
    passes.run(90, 1, 2, 3, others=2)
    assert passes.share.share() == 0.8  # 2 + 1 + 2 + 3 of 10 seconds
    passes.run(5, 1, 1, 1, others=2)
    assert passes.share.share() == 0.8


def test_measured_pass_represents_passes_until_the_next(passes: Passes) -> None:
    """Passes 0 and 1 count as pass 1, passes 2 and 3 as 3, and passes 4 and 5 as 4.

    A kernel is compiled in pass 2.
    """
    seconds = [(9, 9), (1, 9), (90, 8), (2, 8), (6, 4), (9, 9)]
    for attention, others in seconds:
        passes.run(attention, others=others)
    assert passes.share.share() == pytest.approx((1 + 2 + 6) / 30)


def test_passes_that_skip_calls_and_those_that_do_not_both_count(passes: Passes) -> None:
    """A cache of outputs saves the calls of every other pass."""
    for _ in range(4):
        passes.run(3, 3, others=3)
        passes.run(others=1)
    assert passes.share.share() == 0.6


def test_phases_are_weighted_by_their_time(passes: Passes) -> None:
    passes.run(2, others=2, phase="prefill")
    passes.run(0, others=6, phase="decode")
    passes.run(9, others=0, phase=RECOMPUTE)
    assert passes.share.share() == 0.2


def test_batches_of_an_engine_have_phases_of_their_own(
    passes: Passes, monkeypatch: pytest.MonkeyPatch
) -> None:
    for phase, attention, others in [("prefill", 8, 2), ("decode", 1, 1)] * 2:
        monkeypatch.setattr(prepared, "phase", phase)
        passes.run(attention, others=others, phase="encode")
    assert passes.share.share() == 0.75


def test_share_is_unknown_with_calls_outside_of_passes(passes: Passes) -> None:
    passes.run(0, others=3)
    assert passes.share.share() is None
    passes.run(1, others=3)
    passes.share.mark()
    assert passes.share.share() is None


def test_error_of_the_clock_does_not_reach_the_model(
    passes: Passes, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes.run(1, others=3)
    monkeypatch.setattr(attention_share, "_now", mock.Mock(side_effect=RuntimeError))
    passes.run(1, others=3)
    assert passes.share.share() is None


@pytest.mark.parametrize(
    ("share", "clause"),
    [
        (0.38, "attention takes 38% of a forward pass, which gains at most 1.61×"),
        (1.0, "attention takes 100% of a forward pass"),
        (None, ""),
    ],
)
def test_share_bounds_the_gain(share: float | None, clause: str) -> None:
    assert CaptureRecord("model", "random", attention_share=share).most_gain == clause


def test_recording_keeps_the_share(tmp_path: Path) -> None:
    (capture,) = recorded(tmp_path, attend(*torch.randn(3, 1, 2, 64, 8))).captures
    assert capture.attention_share is not None
    assert 0 < capture.attention_share <= 1
