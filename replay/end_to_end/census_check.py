"""Check that a rebuilt model makes the recorded attention calls.

A newer library, changed defaults or another file at the same path may build a different model. The
recorded call counts predict nothing for such a model.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from capture.hooks.census import Census
from capture.hooks.entry_points import follow_entry_points
from capture.hooks.interceptor import Arguments, intercept
from capture.hooks.modules import ModuleTracker
from capture.storage.capture_record import CaptureRecord


@contextlib.contextmanager
def counting(roots: Mapping[str, nn.Module]) -> Iterator[Census]:
    """Count the model's attention calls as `capture` does."""
    tracker, census = ModuleTracker(roots), Census()

    def handle(
        arguments: Arguments, proceed: Callable[[], Tensor], sdpa: Callable[..., Tensor]
    ) -> Tensor:
        census.add(tracker.site, arguments)
        return proceed()

    with tracker.watch(), intercept(handle, keeps_fast_path=True), follow_entry_points(handle):
        yield census


def difference(recorded: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    """Describe in one sentence how two censuses differ; empty if they agree.

    Dtypes are not compared: under autocast, a recording contains the dtypes that reach the kernel.
    """
    before, now = _calls(recorded), _calls(found)
    differing = [site for site in {**before, **now} if before[site] != now[site]]
    if not differing:
        return ""
    module, phase, *shapes = differing[0]
    called = " × ".join(str(list(shape)) for shape in shapes[:2])
    remedy = "capture it again"
    if -1 in shapes[0]:  # batches of an engine
        remedy += ", with the engine's prefix caching turned off"
    return (
        f"the model built here is not the one recorded: {module or 'code outside all modules'} "
        f"({phase}) calls attention {now[differing[0]]} times on {called}, not "
        f"{before[differing[0]]} times as recorded: {remedy}"
    )


def shortfall(capture: CaptureRecord) -> str:
    """Describe the recorded run's attention that predictions do not include; empty if none."""
    past = [
        f"{each['forwards'] or 'unknown'} runs of {each['kind']} (such as {each['example']})"
        for each in capture.missed_attention
    ]
    if not past:
        return ""
    return (
        "predictions leave out attention that the recording could not see, in "
        f"{', '.join(past)}: they assume that it is as slow with any kernel"
    )


def _calls(census: Mapping[str, Any]) -> Counter[tuple[Any, ...]]:
    calls: Counter[tuple[Any, ...]] = Counter()
    for row in census["rows"]:
        signature = census["signatures"][row["signature"]]
        query, key, value = (tuple(signature[name]) for name in ("query", "key", "value"))
        calls[row["module"], row["phase"], query, key, value] += row["calls"]
    return calls
