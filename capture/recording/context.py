"""Options and objects that all parts of one recording share."""

from __future__ import annotations

from dataclasses import dataclass, field

from capture.hooks.modules import ModuleTracker
from capture.recording.counts import RecordingCounts
from capture.recording.parts import RankPart
from capture.recording.sampling import Sampler
from capture.storage.capture_record import CaptureRecord
from capture.storage.target import CaptureTarget


@dataclass(frozen=True, eq=False)
class RecordingContext:
    """Options of `record`, with every default filled in, and the objects made from them."""

    sampler: Sampler
    tracker: ModuleTracker
    target: CaptureTarget
    capture: CaptureRecord
    heads: tuple[int, ...] | None
    """Query heads that are stored; None for all."""
    seed: int | None
    rank: int | None
    """Rank of this process; None if there is only one process."""
    part: RankPart | None
    """Part of each call that this rank holds; None if the user did not declare a part."""
    keeps_output: bool
    keeps_gradients: bool
    buffer_bytes: int
    """Host memory for calls that are not written yet."""
    durable: bool
    """True to write each call to the disk before the model continues."""
    counts: RecordingCounts = field(default_factory=RecordingCounts)
