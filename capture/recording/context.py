"""Objects that all parts of one recording share."""

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
    """Options, sampler, watched modules, target directory and counts of one recording."""

    options: RecordOptions
    sampler: Sampler
    tracker: ModuleTracker
    target: CaptureTarget
    capture: CaptureRecord
    counts: RecordingCounts = field(default_factory=RecordingCounts)
