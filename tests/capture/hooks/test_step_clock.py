"""Forward passes of one denoising step have the same step, and their own forward index."""

import copy
import inspect
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from capture import load, record
from capture.hooks import step_clock
from tests.in_this_process import RunCli


class Scheduler:
    def set_timesteps(self, count: int) -> None: ...

    def step(self, states: Tensor, *, eta: float = 0.0) -> Tensor:
        return states + eta


class Inherited(Scheduler): ...


class Attend(nn.Module):
    def forward(self, states: Tensor, timestep: Any = None) -> Tensor:
        return nn.functional.scaled_dot_product_attention(states, states, states)


class Pipeline:
    """A pipeline of two denoisers, whose loop of three steps runs `body(pipeline, index)`."""

    def __init__(self, scheduler: Any, body: Callable[["Pipeline", int], None]) -> None:
        self.scheduler, self._body = scheduler, body
        self.components = {"first": Attend(), "second": Attend(), "scheduler": scheduler}

    def run(self, timestep: Any, name: str = "first") -> None:
        self.components[name](torch.zeros(1, 1, 4, 8), timestep)

    def __call__(self) -> None:
        if self.scheduler is not None:
            self.scheduler.set_timesteps(3)
        for index in range(3):
            self._body(self, index)
            if self.scheduler is not None:
                self.scheduler.step(torch.zeros(1))


class Unscheduled(Pipeline):
    """A pipeline that does not call its scheduler."""

    def __call__(self) -> None:
        for index in range(3):
            self._body(self, index)


def unknown(_: int) -> Tensor:
    """Return a time step whose value cannot be read, like one on a GPU."""
    return torch.empty((), device="meta")


def guidance(time_step: Callable[[int], Any]) -> Callable[["Pipeline", int], None]:
    def body(pipeline: Pipeline, index: int) -> None:
        pipeline.run(time_step(index))
        pipeline.run(time_step(index))

    return body


def wan(pipeline: Pipeline, index: int) -> None:
    """Run one transformer in early steps and the other later, and a copy of the scheduler."""
    for _ in range(2):
        pipeline.run(unknown(index), "first" if index < 2 else "second")
    copy.deepcopy(pipeline.scheduler).step(torch.zeros(1))


def controlled(pipeline: Pipeline, index: int) -> None:
    pipeline.run(unknown(index), "second")
    pipeline.run(unknown(index))


def threaded(pipeline: Pipeline, index: int) -> None:
    """Run each prompt in a new thread, like the replicas of DataParallel."""
    for _ in range(2):
        thread = threading.Thread(target=pipeline.run, args=(unknown(index),))
        thread.start()
        thread.join()


def changed_in_place(pipeline: Pipeline, index: int) -> None:
    time_step = torch.zeros(1)
    pipeline.run(time_step)
    pipeline.run(time_step.add_(1))


def reads_signature(pipeline: Pipeline, index: int) -> None:
    assert "eta" in inspect.signature(pipeline.scheduler.step).parameters
    assert pipeline.scheduler.step(torch.zeros(1), eta=2.0).item() == 2
    guidance(unknown)(pipeline, index)


TWICE, ONCE = [0, 0, 1, 1, 2, 2], [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("pipeline", "steps"),
    [
        (Pipeline(None, guidance(float)), TWICE),
        (Pipeline(None, guidance(torch.tensor)), TWICE),
        (Pipeline(None, guidance(unknown)), ONCE),
        (Pipeline(None, changed_in_place), ONCE),
        (Pipeline(Scheduler(), guidance(unknown)), TWICE),
        (Pipeline(Inherited(), guidance(unknown)), TWICE),
        (Pipeline(Scheduler(), wan), TWICE),
        (Pipeline(Scheduler(), threaded), TWICE),
        (Pipeline(Scheduler(), controlled), TWICE),
        (Pipeline(Scheduler(), reads_signature), TWICE),
        (Unscheduled(Scheduler(), guidance(torch.tensor)), TWICE),
    ],
)
def test_step_is_the_schedulers(
    pipeline: Pipeline, steps: list[int], run_cli: RunCli, tmp_path: Path
) -> None:
    before = Scheduler.step
    with record(pipeline, tmp_path / "d", max=99):
        pipeline()
    assert Scheduler.step is before
    assert "step" not in vars(Inherited)
    found = [call.origin for call in load(tmp_path / "d")]
    assert [origin.step for origin in found] == steps
    if {origin.module for origin in found} == {"first"}:
        assert [origin.forward_index for origin in found] == [*range(6)]
    assert "forwards" not in run_cli("show", str(tmp_path / "d"))[1]


def test_steps_begin_at_0_in_each_run(tmp_path: Path) -> None:
    pipeline = Pipeline(Scheduler(), guidance(unknown))
    with record(pipeline, tmp_path / "d", max=99) as recording:
        pipeline()
        pipeline()
    assert [call.origin.step for call in load(tmp_path / "d")] == 2 * TWICE
    assert [(count.first_step, count.last_step) for _, count in recording.census.items()] == [
        (0, 2)
    ]


def test_step_replaced_by_the_program_is_not_restored() -> None:
    class Own(Scheduler): ...

    with step_clock.SchedulerCalls({Own}).count():
        Own.step = Scheduler.step  # type: ignore[method-assign]
    assert vars(Own)["step"] is Scheduler.step


def test_views_of_the_schedule_are_compared_by_place_in_memory() -> None:
    """Time steps on a GPU are views of one tensor, which must not be read."""

    def place(tensor: Tensor) -> tuple[Any, ...]:
        return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor._version, tensor

    schedule = torch.arange(3.0)
    first = place(schedule[0].expand(2))
    assert step_clock._is_same(first, place(schedule[0].expand(2))) is True
    assert step_clock._is_same(first, place(schedule[1].expand(2))) is False
    assert step_clock._is_same(first, place(torch.zeros(1).expand(2))) is None
    schedule.add_(1)
    assert step_clock._is_same(first, place(schedule[0].expand(2))) is False


def test_old_recording_says_that_its_steps_are_forward_passes(run_cli: RunCli) -> None:
    old = Path(__file__).parents[1] / "storage" / "first_format"
    assert {call.origin.forward_index for call in load(old)} == {None}
    assert "counts forwards, not steps" in load(old)._repr_html_()
    assert "counts forwards, not steps" in " ".join(run_cli("show", str(old))[1].split())
