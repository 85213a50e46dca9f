"""Energy and settled times of a block of calls; the clock and the energy counter are simulated."""

from collections.abc import Callable, Iterator

import pytest

from replay.timing.energy import EnergyBlock, block
from replay.timing.gpu_state import NoReading


class FakeGpu:
    """GPU with constant power; its counter (in millijoules) updates every `tick_ms`."""

    def __init__(self, watts: float, tick_ms: float = 100.0) -> None:
        self.watts = watts
        self.tick_ms = tick_ms
        self.now_ms = 1234.5

    def chunks(self, milliseconds: Callable[[float], float]) -> Iterator[float]:
        """Run chunks of calls; `milliseconds` returns a chunk's duration, given its start time."""
        began = self.now_ms
        while True:
            took = milliseconds(self.now_ms - began)
            self.now_ms += took
            yield took

    def clock(self) -> float:
        return self.now_ms / 1000

    def read(self) -> int:
        moved = self.now_ms // self.tick_ms * self.tick_ms
        return int(moved * self.watts)

    def watch(self, milliseconds: Callable[[float], float], calls: int) -> EnergyBlock:
        return block(self.chunks(milliseconds), calls, self.read, self.clock)


@pytest.mark.parametrize("tick_ms", [20.0, 100.0])
@pytest.mark.parametrize(("chunk_ms", "calls"), [(5.0, 100), (5.0, 1), (400.0, 1)])
def test_energy_is_power_times_time(tick_ms: float, chunk_ms: float, calls: int) -> None:
    found = FakeGpu(500.0, tick_ms).watch(lambda now: chunk_ms, calls)
    slack = 0.02 if chunk_ms < tick_ms else 0.2  # how often the counter is read decides
    assert found.power_w == pytest.approx(500, rel=slack)
    assert found.mj == pytest.approx(500 * chunk_ms / calls, rel=slack)
    assert found.seconds >= 1
    assert not found.settles
    assert found.burst_ms == found.sustained_ms == chunk_ms / calls


def test_falling_clock_shows_in_sustained_time() -> None:
    found = FakeGpu(700.0).watch(lambda now: 4.0 if now < 30 else 5.0, calls=10)
    assert (found.burst_ms, found.sustained_ms, found.settles) == (0.4, 0.5, True)
    # The energy is measured after the clock has settled.
    assert found.mj == pytest.approx(700 * 0.5, rel=0.02)


@pytest.mark.parametrize(("slowed", "settles"), [(1.02, False), (1.04, True), (0.96, True)])
def test_difference_of_three_per_cent_is_reported(slowed: float, settles: bool) -> None:
    found = FakeGpu(700.0).watch(lambda now: 4.0 if now < 30 else 4.0 * slowed, calls=10)
    assert found.settles is settles


def test_counter_that_stands_still_is_refused() -> None:
    with pytest.raises(NoReading, match="has not changed"):
        FakeGpu(0.0).watch(lambda now: 5.0, calls=1)
