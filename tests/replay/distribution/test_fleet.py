"""Calls spread over two devices. Stand-ins simulate failures; CPUs run the whole command."""

import contextlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Barrier, Event
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import replay as replay_package
from replay.bench.reported_stages import FIRST_CALLS, FIRST_CALLS_DONE
from replay.bench.settings import Settings
from replay.distribution.device_slots import Device
from replay.distribution.fleet import DeviceSlot, Fleet, running_fleet
from replay.kernels.registry import Kernel
from replay.rows.row import HERE, CallFacts, KernelId, Machine, Row
from replay.workers.environment_options import WorkerError
from replay.workers.environments import ProbeResult
from replay.workers.execution import Assignment
from replay.workloads.random_calls import Spec
from replay.workloads.schedule import Schedule
from replay.workloads.workload import Workload, random_workload
from tests import factories
from tests.in_this_process import RunCli

REPOSITORY = Path(replay_package.__file__).resolve().parent.parent
CPUS = [Device(f"CPU {index}", "a processor", f"uuid-{index}") for index in range(2)]
QUICK = ("--rounds", "3")


def calls(count: int) -> list[Workload]:
    return [
        random_workload(f"random-{number:02d}", "random", Spec(1, 2, 2, 64, 64, 32, 32), number)
        for number in range(count)
    ]


class StandIn:
    def __init__(
        self,
        fails: Callable[[Workload], Row | Exception | None] = lambda call: None,
        *,
        works: bool = True,
        together: Barrier | None = None,
    ) -> None:
        self._fails = fails
        self._works = works
        self._together = together
        self.replayed: list[str] = []
        self.compiled: list[tuple[str, list[str]]] = []

    def replay(
        self, schedule: Schedule, assigned: Assignment, settings: Settings, report: Any
    ) -> Iterator[Row]:
        (call,) = schedule
        report(call, "torch-math")
        self.replayed.append(call.name)
        if self._together is not None:
            self._together.wait(60)
        failure = self._fails(call)
        if isinstance(failure, Exception):
            raise failure
        if failure is not None:
            yield failure
            return
        for kernel in assigned[HERE]:
            yield Row(kernel.name, CallFacts(call.name), "ok", first_call_ms=1.0)

    def first_calls(
        self, call: Workload, assigned: Assignment, settings: Settings, report: Any
    ) -> dict[KernelId, float]:
        self.compiled.append((call.name, [kernel.name for kernel in assigned[HERE]]))
        return {KernelId(kernel.name): 1000.0 for kernel in assigned[HERE]}

    def machines(self, device: torch.device) -> list[Machine]:
        return [Machine("a processor")]

    def work_on(self, device: torch.device) -> bool:
        return self._works


Replayed = tuple[list[Row], list[tuple[str, str, str]]]


@pytest.fixture
def replayed(quick: Settings) -> Iterator[Callable[..., Replayed]]:
    """`replayed(…)` runs calls on stand-in workers, and returns the rows and progress reports."""
    with ThreadPoolExecutor(2) as pool:

        def run(*workers: StandIn, count: int = 4) -> Replayed:
            slots = [
                DeviceSlot(device, each)  # type: ignore[arg-type]
                for device, each in zip(CPUS, workers, strict=False)
            ]
            assigned = {HERE: [factories.kernel("a"), factories.kernel("b")]}
            reported: list[tuple[str, str, str]] = []
            rows = Fleet(slots, pool).replay(
                Schedule(calls(count)),
                assigned,
                quick,
                lambda call, stage, device="": reported.append((call.name, stage, device)),
            )
            return list(rows), reported

        yield run


def crash(call: Workload) -> Row:
    return Row("", CallFacts(call.name), "crash", f"{call.name}: gone while loading the call")


def test_both_devices_are_at_work_and_rows_say_on_which(replayed: Callable[..., Replayed]) -> None:
    together = Barrier(2)  # the barrier breaks if one device runs all calls
    rows, reported = replayed(StandIn(together=together), StandIn(together=together))
    assert len(rows) == 8
    assert {row.ran_on for row in rows} == {"CPU 0 (uuid-0)", "CPU 1 (uuid-1)"}
    for call in calls(4):
        assert len({row.ran_on for row in rows if row.call.name == call.name}) == 1
        stages = [each for name, *each in reported if name == call.name][-2:]
        assert stages in ([["torch-math", f"CPU {cpu}"], ["done", ""]] for cpu in range(2))


def test_first_call_is_the_one_that_compiled(replayed: Callable[..., Replayed]) -> None:
    one, other = StandIn(), StandIn()
    rows, reported = replayed(one, other)
    compiled = [*one.compiled, *other.compiled]
    assert sorted(names for _, names in compiled) == [["a"], ["b"]]
    assert {name for name, _ in compiled} == {"random-00"}
    stages = (FIRST_CALLS, FIRST_CALLS_DONE)
    assert {("random-00", stage, device.name) for stage in stages for device in CPUS} <= {*reported}
    for row in rows:
        assert row.first_call_ms == (1000.0 if row.call.name == "random-00" else 1.0)


def test_call_whose_worker_dies_is_replayed_elsewhere(replayed: Callable[..., Replayed]) -> None:
    bad, good = StandIn(lambda call: crash(call)), StandIn()
    rows, _ = replayed(bad, good)
    assert {row.status for row in rows} == {"ok"}
    assert sorted(good.replayed) == [call.name for call in calls(4)]
    told = {row.call.name for row in rows if row.flags}
    assert told == set(bad.replayed)
    assert bad.replayed
    assert all(
        row.flags
        == (f"measured after CPU 0 (uuid-0) failed: {row.call.name}: gone while loading the call",)
        for row in rows
        if row.flags
    )


@pytest.mark.parametrize("devices", [1, 2])
def test_failing_everywhere_keeps_a_row(replayed: Callable[..., Replayed], devices: int) -> None:
    fails = [StandIn(lambda call: crash(call) if call.name.endswith("1") else None)] * devices
    rows, reported = replayed(*fails)
    assert sorted(row.call.name for row in rows if row.status == "crash") == ["random-01"]
    assert len({row.call.name for row in rows}) == 4
    assert [stage for _, stage, _ in reported].count("done") == 4


def test_call_that_cannot_be_read_is_not_tried_again(replayed: Callable[..., Replayed]) -> None:
    one, other = (StandIn(lambda call: factories.unreadable(call.name)) for _ in range(2))
    rows, _ = replayed(one, other)
    assert len(rows) == 4
    assert len(one.replayed) + len(other.replayed) == 4


def test_device_that_is_lost_costs_no_row(
    replayed: Callable[..., Replayed], caplog: pytest.LogCaptureFixture
) -> None:
    lost, good = StandIn(lambda call: WorkerError("no driver"), works=False), StandIn()
    rows, _ = replayed(lost, good)
    assert len(rows) == 8
    assert len(lost.replayed) == 1
    assert caplog.messages == ["replay: CPU 0 (uuid-0) is given up: no driver"]


@pytest.mark.parametrize(
    ("failure", "works", "count", "reason"),
    [
        (crash, False, 5, "^no device is left that works; --resume continues"),
        (lambda call: WorkerError("gone"), False, 1, "^gone; --resume continues on others$"),
        (lambda call: WorkerError("it needs torch"), True, 4, "^it needs torch$"),
    ],
)
def test_run_ends_when_no_device_works(
    replayed: Callable[..., Replayed],
    failure: Callable[[Workload], Row | Exception],
    works: bool,
    count: int,
    reason: str,
) -> None:
    with pytest.raises(WorkerError, match=reason):
        replayed(*(StandIn(failure, works=works) for _ in range(2)), count=count)


def test_ctrl_c_stops_every_device(quick: Settings) -> None:
    """Without the stop, the pool would wait until the running calls end."""
    stopped, running = Event(), Barrier(2)
    waits = StandIn(lambda call: WorkerError("stopped" * stopped.wait(60)), together=running)
    slots = [DeviceSlot(device, waits) for device in CPUS]  # type: ignore[arg-type]

    def interrupt(call: Workload, stage: str, device: str = "") -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), running_fleet(slots, stopped) as fleet:
        list(fleet.replay(Schedule(calls(2)), {HERE: []}, quick, interrupt))
    assert waits.replayed


KINDS = [
    Device("GPU 0 of one", "H100", host="one"),
    Device("GPU 1 of one", "H100", host="one"),
    Device("GPU 0 of two", "H200", host="two"),
]


class OfKind(StandIn):
    """Stand-in for the workers on one type of device."""

    def __init__(self, kind: str, **options: Any) -> None:
        super().__init__(**options)
        self._kind = kind

    def machines(self, device: torch.device) -> list[Machine]:
        return [Machine(self._kind)]

    def probe(self, kernels: Sequence[Kernel], device: torch.device) -> Any:
        reason = None if self._kind == "H200" else "needs an H200"
        return {HERE: {kernel.name: ProbeResult(reason) for kernel in kernels}}


def on_kinds(count: int) -> list[Workload]:
    return [replace(call, on=kind) for kind in ("H100", "H200") for call in calls(count)]


@pytest.fixture
def of_kinds() -> Iterator[Callable[..., tuple[Fleet, list[OfKind]]]]:
    """Fleet of two H100s on one host and an H200 on another host, with their workers."""
    with ThreadPoolExecutor(3) as pool:

        def make(**options: Any) -> tuple[Fleet, list[OfKind]]:
            workers = [
                OfKind(device.kind, **(options if device.kind == "H200" else {}))
                for device in KINDS
            ]
            slots = [DeviceSlot(*each) for each in zip(KINDS, workers, strict=True)]  # type: ignore
            return Fleet(slots, pool), workers

        yield make


def test_each_host_compiles_a_kernel_once_for_all_calls(
    of_kinds: Callable[..., tuple[Fleet, list[OfKind]]], quick: Settings
) -> None:
    fleet, workers = of_kinds()
    assert [machine.device for machine in fleet.machines(quick.device)] == ["H100", "H200"]
    assigned = {HERE: [factories.kernel("a"), factories.kernel("b")]}
    reported: list[tuple[str, str]] = []

    def report(call: Workload, stage: str, device: str = "") -> None:
        reported.append((call.label, stage))

    assert len(list(fleet.replay(Schedule(on_kinds(4)), assigned, quick, report))) == 2 * 4 * 2
    # Compile caches are on a host's disk, so each host compiles every kernel once.
    one, other, alone = ([names for _, names in each.compiled] for each in workers)
    assert sorted([*one, *other]) == sorted(alone) == [["a"], ["b"]]
    assert {label for label, stage in reported if stage == "done"} == {
        call.label for call in on_kinds(4)
    }


class Measured(OfKind):
    """Stand-in for workers whose rows show torch-flash as faster on one type of device only."""

    def replay(
        self, schedule: Schedule, assigned: Assignment, settings: Settings, report: Any
    ) -> Iterator[Row]:
        (call,) = schedule
        self.replayed.append(call.name)
        found = call.load(settings.device)
        place = {name: getattr(found.origin, name) for name in ("model", "module", "call_index")}
        facts = CallFacts(call.name, shape=found.shape, dtype="float32", **place)
        faster = "torch-flash" if self._kind == "H200" else "torch-math"
        for kernel in assigned[HERE]:
            yield factories.row(
                kernel.name,
                facts,
                1.0 if kernel.name == faster else 2.0,
                machine=Machine(self._kind),
                cache="warm",
                timer="perf_counter",
                calls_before=0,
                speedup=factories.speedup_over("torch-math", factories.speedup(2.0))
                if kernel.name == faster == "torch-flash"
                else None,
            )


def test_cluster_of_two_types_has_a_table_for_each_and_one_of_both(
    run_cli: RunCli, recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    everyone: list[Measured] = []

    @contextlib.contextmanager
    def connected(address: str) -> Iterator[Any]:
        yield SimpleNamespace(device=torch.device("cpu"), fleet=fleet)

    def fleet(pythons: dict[str, str], timeout: float, stopped: Event) -> Any:
        workers = [Measured(device.kind) for device in KINDS]
        everyone.extend(workers)
        return running_fleet(
            [DeviceSlot(*each) for each in zip(KINDS, workers, strict=True)], stopped
        )

    monkeypatch.setattr("replay.distribution.ray_cluster.connected", connected)
    rows = tmp_path / "rows.jsonl"
    arguments = ("--dir", str(recorded), "--kernels", "torch-flash,torch-math", "--ray", "auto")
    code, out, err = run_cli(*arguments, "--json", str(rows))
    assert code == 0, err
    headings = [line for line in out.splitlines() if line.startswith(("2 × H100 ·", "H200 ·"))]
    assert len(headings) == 2
    matrix = out.partition("kernels × devices")[2]
    assert re.search(r"torch-flash .* 2\.00× .*fastest", matrix)

    def written() -> list[tuple[str, str, str]]:
        lines = [json.loads(line) for line in rows.read_text().splitlines()]
        return [(line["machine"]["device"], line["call"]["name"], line["host"]) for line in lines]

    expected = [
        (kind, f"model-{index:06d}", host)
        for kind, host in (("H100", "one"), ("H200", "two"))
        for index in range(3)
        for _ in range(2)
    ]
    assert written() == expected
    lines = rows.read_text().splitlines()
    rows.write_text("\n".join([*lines[:2], *lines[8:]]) + "\n")
    everyone.clear()
    code, _, err = run_cli(*arguments, "--json", str(rows), "--resume")
    assert code == 0, err
    assert "3 calls are kept" in err
    assert written() == expected
    assert sorted(name for each in everyone[:2] for name in each.replayed) == [
        "model-000001",
        "model-000002",
    ]
    assert everyone[2].replayed == ["model-000000"]
    code, _, err = run_cli(*arguments, "--report", str(tmp_path / "out.html"))
    assert (code, "--report requires devices of one type, but this cluster has" in err) == (2, True)


@pytest.fixture
def two_cpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Make the CPU look like two GPUs."""
    monkeypatch.setattr("replay.distribution.device_slots.gpus", lambda asked: CPUS)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


@pytest.mark.usefixtures("two_cpus")
@pytest.mark.slow
def test_rows_come_back_in_order_of_calls(run_cli: RunCli, recorded: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    arguments = ("--dir", str(recorded), *QUICK, "--kernels", "torch-flash", "--json", str(rows))
    code, _, err = run_cli(*arguments, "--gpus", "all")
    assert (code, "unexpected" in err) == (0, False)
    found = [json.loads(line) for line in rows.read_text().splitlines()]
    assert [(row["call"]["name"], row["kernel"]) for row in found] == [
        (f"model-{index:06d}", kernel)
        for index in range(3)
        for kernel in ("torch-flash", "torch-math")
    ]
    assert {row["ran_on"] for row in found} <= {str(device) for device in CPUS}
