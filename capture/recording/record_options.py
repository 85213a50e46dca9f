"""Options of `record`, checked once and with every default filled in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from capture.call.head_ranges import parse_ranges
from capture.hooks.modules import denoisers
from capture.recording.memory import default_buffer_bytes
from capture.recording.parts import RankPart, declared
from capture.recording.sampling import PHASES, Sampler, check_sample, make_sampler
from capture.storage.target import current_rank
from capture.text.limits import natural, positive


@dataclass(frozen=True)
class RecordOptions:
    """Options that select the calls of a recording and control their storage."""

    sample: str
    max_calls: int
    max_bytes: int | None
    modules: str
    """Globs of the module paths whose calls may be stored."""
    phase: str
    """Phase whose calls are stored; empty for all phases."""
    heads: tuple[int, ...] | None
    """Query heads that are stored; None for all."""
    seed: int | None
    rank: int | None
    """Rank of this process; None if there is only one process."""
    part: RankPart | None
    """Part of each call that this rank holds; None if the user did not declare a part."""
    keeps_output: bool
    buffer_bytes: int
    """Host memory for calls that are not written yet."""
    durable: bool
    """True to write each call to the disk before the model continues."""
    audit: bool

    @classmethod
    def of(
        cls,
        roots: Mapping[str, nn.Module],
        *,
        max: int,
        sample: str,
        modules: str | None,
        phase: str | None,
        heads: Sequence[int] | None,
        seed: int | None,
        rank: int | None,
        split: str | None,
        split_ranks: Sequence[int] | None,
        max_bytes: int | None,
        buffer_bytes: int | None,
        durable: bool,
        output: bool,
        audit: bool,
    ) -> RecordOptions:
        """Check the arguments of `record`, and fill in the defaults.

        Raises:
            ValueError: an argument has an invalid value.
            CaptureError: the split of calls over ranks is not known.
        """
        if phase is not None and phase not in PHASES:
            raise ValueError(f"phase must be {', '.join(PHASES)} or None, not {phase!r}")
        if heads is not None and (isinstance(heads, str) or not isinstance(heads, Iterable)):
            raise ValueError(f"heads must be a list of numbers, such as [0, 2], not {heads!r}")
        rank = current_rank() if rank is None else natural("rank", rank)
        part = declared(split, split_ranks, rank, heads)
        if buffer_bytes is None:
            buffer_bytes = default_buffer_bytes()
        if modules is None:
            modules = ",".join(f"{name},{name}.*" for name in denoisers(roots) if name) or "*"
        check_sample(sample)
        return cls(
            sample=sample,
            max_calls=positive("max", max),
            max_bytes=None if max_bytes is None else positive("max_bytes", max_bytes),
            modules=modules,
            phase=phase or "",
            heads=None if heads is None else parse_ranges(",".join(map(str, heads))),
            seed=None if seed is None else natural("seed", seed),
            rank=rank,
            part=part,
            keeps_output=output,
            buffer_bytes=positive("buffer_bytes", buffer_bytes),
            durable=durable,
            audit=audit,
        )

    def new_sampler(self) -> Sampler:
        """Create the sampler that these options select."""
        return make_sampler(self.sample, self.max_calls, self.max_bytes, self.seed or 0)
