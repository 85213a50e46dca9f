"""Times of our decode kernels over caches of several formats, beside that over 16 bits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import TYPE_CHECKING

from replay.api.replay_calls import replay

if TYPE_CHECKING:
    import torch

    from capture.storage.dataset import Dataset
    from replay.accuracy.cache_formats import CacheFormat
    from replay.diagnosis.cache_tables import DecodeTime
    from replay.rows.row import Row

BASELINE = "triton-decode"
"""Our decode kernel over a cache in 16 bits."""


def decode_times(
    dataset: Dataset,
    calls: Sequence[str],
    formats: Iterable[CacheFormat],
    device: torch.device,
    *,
    workers: bool = True,
    progress: bool | None = None,
) -> dict[str, DecodeTime]:
    """Replay calls with the decode kernels of formats, and return the times by format.

    Args:
        calls: names of the calls that decode.
        workers: False to run the kernels in this process.
        progress: False to hide progress on stderr.

    Returns:
        Times of the formats with a kernel that runs on the device and ran a call, like the one over
        16 bits. The kernels need calls in 16 bits without pages.
    """
    from replay.kernels.registry import find

    kernels = {each.name: each.kernel for each in formats if each.kernel}
    wanted = [*dict.fromkeys([BASELINE, *kernels.values()])]
    able = [name for name in wanted if find(name).unavailable(device) is None]
    if not calls or BASELINE not in able or len(able) == 1:
        return {}
    rows = replay(
        dataset, kernels=able, calls=calls, device=str(device), workers=workers, progress=progress
    )
    return times_of(rows, kernels)


def times_of(rows: Iterable[Row], kernels: dict[str, str]) -> dict[str, DecodeTime]:
    """Return the times of rows by format; `kernels` has the kernel of each format.

    A kernel without a core of its own prepares nothing, so its whole time counts.
    """
    from replay.diagnosis.cache_tables import DecodeTime

    core: dict[str, dict[str, float]] = {}
    for row in rows:
        time = row.core_time_ms or row.time_ms
        if time is not None:
            core.setdefault(row.kernel, {})[row.call.name] = time.p50
    exact, found = core.get(BASELINE, {}), {}
    for name, kernel in kernels.items():
        both = [(ms, exact[call]) for call, ms in core.get(kernel, {}).items() if call in exact]
        if both:
            times, exact_times = zip(*both, strict=True)
            found[name] = DecodeTime(kernel, fmean(times), fmean(exact_times), len(both))
    return found
