"""All checks of the self-test, and their joint verdict."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from replay.rows.row import Machine
from replay.selftest import clock, environment_checks
from replay.selftest.cheats import planted_cheats
from replay.selftest.result import Result
from replay.timing.machine import describe


@dataclass(frozen=True)
class SelftestReport:
    """Joint result of the self-test on a machine."""

    machine: Machine
    results: tuple[Result, ...]
    resolution: float | None
    """Share by which two kernels must differ to be distinguished; None if unknown."""

    @property
    def passed(self) -> bool:
        return all(result.passed is not False for result in self.results)

    @property
    def sentence(self) -> str:
        """Sentence about the machine's resolution, or about the most important thing to repair."""
        failed = [result for result in self.results if result.passed is False]
        if failed:
            names = ", ".join(result.name for result in failed)
            return f"do not rely on times of this machine ({names}): {failed[0].remedy}"
        if self.resolution is None:
            return "this machine passed every check"
        # The percentage is rounded up, so that no smaller difference is promised.
        percent = max(math.ceil(self.resolution * 1000) / 10, 0.1)
        return f"this machine can tell kernels apart that differ by more than {percent:g} %"

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON; names end with units."""
        return {
            "selftest": 1,
            "passed": self.passed,
            "sentence": self.sentence,
            "resolution": self.resolution,
            "machine": asdict(self.machine),
            "checks": [asdict(result) for result in self.results],
        }


def selftest(
    device: torch.device, report: Callable[[str], None] = lambda name: None
) -> SelftestReport:
    """Run every check on a device; `report` gets the name of the next check.

    A check that cannot run counts as failed, and the other checks still run.
    """
    results: list[Result] = []
    resolution: float | None = None

    def attempt(name: str, check: Callable[[], Result]) -> None:
        report(name)
        try:
            results.append(check())
        except Exception as error:
            sentence = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            results.append(Result(name, False, sentence, "check that PyTorch works on this device"))

    def same_kernel() -> Result:
        # One measurement is used by two checks and by the resolution.
        nonlocal resolution
        apart, spread, resolution = clock.same_kernel(device)
        results.append(apart)
        return spread

    with torch.no_grad():
        attempt("processor time", environment_checks.processor)
        if device.type == "cuda":
            attempt("clocks", lambda: environment_checks.clocks(device))
        attempt("same kernel", same_kernel)
        attempt("known ratio", lambda: clock.known_ratio(device))
        attempt("known delay", lambda: clock.known_delay(device))
        attempt("empty kernel", lambda: clock.nothing(device))
        if device.type == "cuda":
            attempt("profiler", lambda: clock.profiler(device))
        attempt("planted cheats", lambda: planted_cheats(device))
    return SelftestReport(describe(device), tuple(results), resolution)
