"""Python environments that kernels run in, and replays spread over them.

Kernel packages collide: FlashAttention 4 breaks `import diffusers`, SageAttention 1 and 2 share a
name. So every kernel runs in a worker process, and a worker may use another interpreter. The
environment called `this` is the one that replays.
"""

from __future__ import annotations

import dataclasses
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from replay.process import Died, Process
from replay.registry import Kernel
from replay.results import CallFacts, Row, rebuilt
from replay.settings import Settings
from replay.workloads import Workload

THIS = "this"

MAXIMUM_DEATHS = 3
"""A kernel that ended this many workers is not tried again."""


class WorkerError(Exception):
    """An environment that cannot be used as given; the message names the remedy."""


@dataclasses.dataclass(frozen=True)
class Found:
    """What an environment says of one kernel."""

    reason: str | None
    """Why it cannot run there; None when it can."""
    version: str


class Environment:
    """One interpreter and its worker."""

    def __init__(self, name: str, python: str, timeout: float) -> None:
        self.name = name
        self._process = Process(python, timeout)
        self._deaths: dict[str, Died] = {}
        self._death_count: dict[str, int] = {}

    def close(self) -> None:
        self._process.close()

    def probe(self, kernels: Sequence[Kernel], device: str) -> dict[str, Found]:
        """Which of the kernels can run here; one that kills the worker cannot."""
        found: dict[str, Found] = {}
        while missing := [kernel.name for kernel in kernels if kernel.name not in found]:
            try:
                for message in self._process.ask(do="probe", kernels=missing, device=device):
                    if "probed" in message:
                        found[message["probed"]] = Found(message["reason"], message["version"])
            except Died as death:
                if not death.kernel:
                    raise WorkerError(self._cannot_start(death)) from death
                found[death.kernel] = Found(f"{death.status} when asked: {death.reason}", "")
        return found

    def replay(
        self,
        workload: Workload,
        kernels: Sequence[Kernel],
        settings: Settings,
        report: Callable[[str], None],
    ) -> list[Row]:
        """Rows of the kernels on one call. A death costs the row of the kernel that caused it.

        Raises:
            WorkerError: the worker cannot start.
        """
        lost: dict[str, Died] = {
            name: death
            for name, death in self._deaths.items()
            if self._death_count[name] >= MAXIMUM_DEATHS
        }
        facts = CallFacts(workload.name)
        while True:
            names = [kernel.name for kernel in kernels if kernel.name not in lost]
            careful = dataclasses.replace(
                settings, careful=bool(lost), never=(*settings.never, *lost)
            )
            rows: list[Row] = []
            try:
                for message in self._process.ask(
                    do="replay",
                    workload=workload.source,
                    kernels=names,
                    settings=careful.to_json(),
                ):
                    if "call" in message:
                        facts = rebuilt(CallFacts, message["call"])
                    elif "row" in message:
                        rows.append(rebuilt(Row, message["row"]))
                    elif "unreadable" in message:
                        rows = [Row("", facts, "error", message["unreadable"])]
                    elif "at" in message:
                        report(message["at"])
            except Died as death:
                if not death.kernel:
                    raise WorkerError(self._cannot_start(death)) from death
                if death.kernel in lost or death.kernel in ("loading", "reference"):
                    # Nobody to leave out: the call itself cannot be worked on.
                    return [Row("", facts, death.status, death.reason, log=death.log)]
                lost[death.kernel] = self._deaths[death.kernel] = death
                self._death_count[death.kernel] = self._death_count.get(death.kernel, 0) + 1
                continue
            asked = {kernel.name for kernel in kernels}
            rows += [self._lost_row(name, facts) for name in lost if name in asked]
            for row in rows:
                row.environment = self.name
            return rows

    def _lost_row(self, name: str, facts: CallFacts) -> Row:
        death = self._deaths[name]
        given_up = self._death_count[name] >= MAXIMUM_DEATHS
        note = f"; not tried again after {MAXIMUM_DEATHS}" if given_up else ""
        return Row(name, facts, death.status, death.reason + note, log=death.log)

    def _cannot_start(self, death: Died) -> str:
        log = death.log.strip().splitlines()
        told = f": {log[-1]}" if log else ""
        return (
            f"environment {self.name} ({self._process.python}) does not work: "
            f"{death.reason}{told}; it needs torch and safetensors"
        )


def interpreters(options: Sequence[str], file: str | None) -> dict[str, str]:
    """Interpreters by environment name, from `NAME=PYTHON` options and a TOML file.

    The file has a table `[environments]` with lines `name = "path/to/python"`.

    Raises:
        WorkerError: an option or the file is not of that form, or a Python is not there.
    """
    found: dict[str, str] = {}
    if file is not None:
        found.update(_from_toml(Path(file)))
    for option in options:
        name, _, python = option.partition("=")
        if not name or not python:
            raise WorkerError(f"--env {option}: write NAME=PATH/TO/python")
        found[name] = python
    for name, python in found.items():
        if name == THIS:
            raise WorkerError(f"the name {THIS!r} is taken by the environment that replays")
        if shutil.which(python) is None:
            raise WorkerError(f"--env {name}: there is no Python at {python}")
    return found


def _from_toml(path: Path) -> dict[str, str]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        data: dict[str, Any] = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise WorkerError(f"{path}: {error}") from error
    table = data.get("environments")
    if not isinstance(table, dict) or not all(isinstance(value, str) for value in table.values()):
        raise WorkerError(f'{path}: needs [environments] with lines name = "path/to/python"')
    return table


def replay_in_workers(
    workloads: Sequence[Workload],
    kernels: dict[str, list[Kernel]],
    settings: Settings,
    environments: dict[str, Environment],
    on_progress: Callable[[Workload, str], None] | None = None,
) -> Iterator[Row]:
    """Like `replay.runner.replay`, with the kernels of every environment in its own worker.

    Every environment runs the baseline too, so that speed-ups are paired within one process.
    """
    for workload in workloads:
        for name, environment in environments.items():
            if not kernels.get(name):
                continue

            def report(stage: str, workload: Workload = workload, name: str = name) -> None:
                if on_progress is not None:
                    on_progress(workload, stage if name == THIS else f"{stage} in {name}")

            yield from environment.replay(workload, kernels[name], settings, report)


def allot(kernels: Sequence[Kernel], found: dict[str, dict[str, Found]]) -> dict[str, list[Kernel]]:
    """Which kernels run in which environment.

    A kernel runs wherever its library is; PyTorch's own, which every environment has, run in the
    first. One that runs nowhere keeps its row, with the reason, in the first.

    Args:
        found: what `Environment.probe` said, by environment.
    """
    first, *others = found
    allotted: dict[str, list[Kernel]] = {
        name: [
            kernel
            for kernel in kernels
            if kernel.library != "torch" and found[name][kernel.name].reason is None
        ]
        for name in others
    }
    elsewhere = {kernel.name for chosen in allotted.values() for kernel in chosen}
    here = [
        kernel
        for kernel in kernels
        if found[first][kernel.name].reason is None or kernel.name not in elsewhere
    ]
    return {first: here, **allotted}
