"""Whether the model that was built again is the one that was recorded: by its attention calls.

A newer library, other defaults or another file at the same path may build another model; what was
counted of the old one then predicts nothing of it.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from capture.census import Census, Signature
from capture.interceptor import Arguments, intercept
from capture.modules import ModuleTracker


@contextlib.contextmanager
def counting(roots: Mapping[str, nn.Module]) -> Iterator[Census]:
    """Count the model's attention calls as `capture` does."""
    tracker, census = ModuleTracker(roots), Census()

    def handle(
        arguments: Arguments, proceed: Callable[[], Tensor], sdpa: Callable[..., Tensor]
    ) -> Tensor:
        census.add(tracker.site, Signature.of(arguments))
        return proceed()

    with tracker.watch(), intercept(handle):
        yield census


def difference(recorded: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    """What tells two censuses apart, in a sentence; empty where nothing does.

    Dtypes are not compared: under autocast a capture notes those that reach the kernel.
    """
    before, now = _calls(recorded), _calls(found)
    unlike = [site for site in {**before, **now} if before[site] != now[site]]
    if not unlike:
        return ""
    module, phase, *shapes = unlike[0]
    called = " × ".join(str(list(shape)) for shape in shapes[:2])
    return (
        f"the model built here is not the one recorded: {module or 'a call outside all modules'} "
        f"({phase}) calls attention {now[unlike[0]]} times on {called}, and did so "
        f"{before[unlike[0]]} times; capture it again"
    )


def _calls(census: Mapping[str, Any]) -> Counter[tuple[Any, ...]]:
    calls: Counter[tuple[Any, ...]] = Counter()
    for row in census["rows"]:
        signature = census["signatures"][row["signature"]]
        query, key, value = (tuple(signature[name]) for name in ("query", "key", "value"))
        calls[row["module"], row["phase"], query, key, value] += row["calls"]
    return calls
