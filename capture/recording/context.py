"""The objects that every part of one recording works with."""

from __future__ import annotations

from dataclasses import dataclass, field

from capture.hooks.modules import ModuleTracker
from capture.recording.counts import RecordingCounts
from capture.recording.record_options import RecordOptions
from capture.recording.sampling import Sampler
from capture.storage.capture_record import CaptureRecord
from capture.storage.target import CaptureTarget


@dataclass(frozen=True, eq=False)
class RecordingContext:
    """One recording's options, and what it watches, writes to and counts."""

    options: RecordOptions
    sampler: Sampler
    tracker: ModuleTracker
    target: CaptureTarget
    capture: CaptureRecord
    counts: RecordingCounts = field(default_factory=RecordingCounts)
