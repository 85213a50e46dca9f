"""Parent's side of a model that runs in a child process."""

from __future__ import annotations

import json
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

from attention_replay.errors import Error
from replay.end_to_end.model_clock import RunTimes
from replay.end_to_end.run_pace import BUILDING, COUNTING, RunPace
from replay.rows.row import HERE, GpuState, KernelId, Status
from replay.rows.row_files import rebuilt
from replay.workers.messages import reading
from replay.workers.process import CannotStart, Died, Process

T = TypeVar("T")

OWN = "torch-default"
"""Kernel that stands for the model's own attention where the model calls plain SDPA."""

BUILDING_SECONDS = 1800.0
"""Seconds without a message after which building is abandoned; weights may be on a slow disk."""


class ModelRefused(Error):
    """Reason why the model cannot be built; the message gives the remedy."""


class RunFailed(Error):
    """Reason why a run of the model with a kernel did not finish."""

    def __init__(self, status: Status, reason: str, log: str = "") -> None:
        super().__init__(reason)
        self.status = status
        self.log = log


class _Failed(NamedTuple):
    status: Status
    reason: str


@dataclass(frozen=True)
class Variant:
    """Kernel or plan that handles the model's attention calls."""

    name: str
    """Name in the table."""
    kernel: str | None = None
    """Name of a registered kernel, or `file.py:function`; None for the model's own attention."""
    plan: Path | None = None
    trust_code: bool = False
    """True if code files named by the plan may run."""
    environment: str = HERE
    """Environment in which the kernel's library is installed."""
    path: tuple[str, ...] = ()
    """Directories of another environment that the kernel's library is imported from."""
    refused: str = ""
    """Reason why the variant cannot run at all; empty if it can."""

    @property
    def kernel_id(self) -> KernelId:
        """Return the id used in the rows; a plan gets an id that no row has."""
        return KernelId(self.kernel or "", self.environment)


BASELINE = Variant("the model's own")
"""Variant that changes no call. It runs through the same hook as the kernels, so that both sides
include its cost."""


@dataclass(frozen=True)
class ModelRun:
    """Result of one run of the model."""

    times: RunTimes
    hits: int
    own_calls: int
    """All calls of the baseline, or those a plan leaves to the model's own attention."""
    fallbacks: dict[str, int]
    """Calls that fell back to the model's own attention, by reason."""
    copies: int
    """Outputs that had to be copied into another layout."""
    missing: list[str]
    """Modules that a plan names but the model does not have."""
    peak_bytes: int | None
    """Peak memory allocated, including the model; None on a CPU."""
    gpu: GpuState | None
    """State of the GPU at the end of the run."""


class ModelRuns(ABC):
    """Runs of a model with one variant after another, in a child process or in this process.

    Args:
        pace: receives each stage, and the time of each run.

    Attributes:
        is_built: True while the model exists; a kernel that crashes a child process destroys it.
        builds: number of times the model was built. Compiled code is lost with the process.
        round: name of the current round, reported with each stage.

    Raises:
        ModelRefused: by every method, if the model cannot be built.
        RunFailed: by `run` and `count`, if the run failed or the process died.
    """

    def __init__(self, pace: RunPace) -> None:
        self.pace = pace
        self.builds = 0
        self.round = ""
        self.is_built = False

    @abstractmethod
    def close(self) -> None:
        """Release the model."""

    @abstractmethod
    def build(self) -> None:
        """Build the model, unless it exists."""

    @abstractmethod
    def _step(self, request: dict[str, Any], read: Callable[[dict[str, Any]], T]) -> T:
        """Build the model if necessary, and return what `read` finds in the reply to a request."""

    def run(
        self,
        variant: Variant,
        *,
        keep: Path | None = None,
        text: str | None = None,
        save: tuple[Path, str] | None = None,
        waits: Mapping[str, float] | None = None,
        drains: bool = False,
    ) -> ModelRun:
        """Run the model once.

        Args:
            keep: a `.safetensors` file for the outputs, by name (`models.outputs`).
            text: a text that a language model also reads, for `text_ids` and `text_logits`;
                requires `keep`.
            save: a directory for viewable outputs, and the model's name in it; requires `keep`.
            waits: seconds by phase that the host needs for a forward. With this argument, every
                attention call is timed; `replay.end_to_end.model_clock` explains how this
                changes the other times.
            drains: measure the host's time for each forward (`RunTimes.host`), on a GPU.
        """
        request = {
            "step": "run",
            "name": variant.name,
            "kernel": variant.kernel,
            "plan": None if variant.plan is None else str(variant.plan.resolve()),
            "trust_code": variant.trust_code,
            "path": list(variant.path),
            "keep": None if keep is None else str(keep),
            "text": text,
            "save": None if save is None else [str(save[0].resolve()), save[1]],
            "waits": None if waits is None else dict(waits),
            "drains": drains,
        }

        def read(answer: dict[str, Any]) -> ModelRun:
            ran = answer["ran"]
            return rebuilt(ModelRun, {**ran.pop("swap"), **ran})

        with self.pace.running(variant.name):
            return self._step(request, read)

    def count(self) -> dict[str, Any]:
        """Run the model once, untimed, and count its attention calls as `capture` does.

        The result is the census, as `capture.hooks.census.Census.to_json` writes it.
        """
        with self.pace.running(COUNTING):
            return self._step(
                {"step": "count"}, lambda answer: cast(dict[str, Any], answer["counted"])
            )

    def _report_at(self, stage: str) -> None:
        self.pace.enter(", ".join(filter(None, (stage, self.round))))


class ModelProcess(ModelRuns):
    """Model in a child process, built on its first run and after each crash of the process.

    Args:
        python: Python interpreter of the child.
        arguments: arguments of `models.load`.
        timeout: seconds without a message after which the child is killed.
        pace: receives each stage, and the time of each run.
    """

    def __init__(
        self, python: str, arguments: dict[str, Any], timeout: float, pace: RunPace
    ) -> None:
        super().__init__(pace)
        self._process = Process(python, timeout, "replay.end_to_end.model_server")
        self._timeout = timeout
        self._build = {"step": "build", "arguments": arguments}

    def close(self) -> None:
        self._process.close()

    def build(self) -> None:
        """Build the model, unless it exists."""
        if self.is_built:
            return
        self._process.timeout = max(self._timeout, BUILDING_SECONDS)
        try:
            with self.pace.running(BUILDING):
                self._answer(self._build)
        except (Died, CannotStart) as end:
            log = end.log.strip().splitlines()[-1:] if isinstance(end, Died) else []
            raise ModelRefused(": ".join(["the model cannot be built", str(end), *log])) from end
        self._process.timeout = self._timeout
        self.is_built = True
        self.builds += 1

    def _step(self, request: dict[str, Any], read: Callable[[dict[str, Any]], T]) -> T:
        self.build()
        try:
            answer = self._answer(request)
            with reading(self._process):
                return read(answer)
        except Died as death:
            self.is_built = False
            raise RunFailed(death.status, str(death), death.log) from death

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        answer: dict[str, Any] = {}
        for message in self._process.ask(**request):
            if "at" in message:
                self._report_at(message["at"])
            else:
                answer |= message
        if "refused" in answer:
            raise ModelRefused(answer["refused"])
        if "failed" in answer:  # building hit a bug in a library or in this project
            raise ModelRefused(f"the model cannot be built: {answer['failed']}")
        if "failed_run" in answer:
            with reading(self._process):
                failed = rebuilt(_Failed, answer["failed_run"])
            raise RunFailed(failed.status, failed.reason)
        return answer


def import_path(python: str) -> tuple[str, ...]:
    """List the directories that another interpreter imports from, but not this interpreter.

    Raises:
        ModelRefused: the interpreter does not start, or its version differs, so its libraries do
            not work here.
    """
    question = "import json, sys; print(json.dumps([sys.version_info[:2], sys.path]))"
    try:
        child = subprocess.run([python, "-c", question], capture_output=True, text=True, check=True)
        version, path = json.loads(child.stdout.splitlines()[-1])
    except (OSError, subprocess.CalledProcessError, ValueError, IndexError) as error:
        raise ModelRefused(f"{python} did not report its import path: {error}") from error
    if tuple(version) != sys.version_info[:2]:
        raise ModelRefused(
            f"{python} is Python {version[0]}.{version[1]}, but the model runs in Python "
            f"{sys.version_info[0]}.{sys.version_info[1]}: install the kernel's library for that "
            "version"
        )
    return tuple(entry for entry in path if entry and entry not in sys.path)
