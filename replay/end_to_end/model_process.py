"""The parent's side of a model in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attention_replay import Error
from replay.end_to_end.model_clock import RunTimes
from replay.rows.files import rebuilt
from replay.rows.row import HERE, GpuState, KernelId, Status
from replay.workers.process import CannotStart, Died, Process

OWN = "torch-default"
"""The kernel that the model's own attention is in the replay: SDPA, which chooses by itself."""

BUILDING_SECONDS = 1800.0
"""How long a model may take to be built without a sign of life: it may be read from a slow disk."""


class ModelRefused(Error):
    """The model cannot be built: one sentence that names the remedy."""


class RunFailed(Error):
    """The model did not come to an end with a kernel."""

    def __init__(self, status: Status, reason: str, log: str = "") -> None:
        super().__init__(reason)
        self.status = status
        self.log = log


@dataclass(frozen=True)
class Variant:
    """What answers the model's attention calls."""

    name: str
    """As in the table."""
    kernel: str | None = None
    """A registered kernel, or `file.py:function`."""
    plan: Path | None = None
    environment: str = HERE
    """Where the kernel's library is installed."""
    path: tuple[str, ...] = ()
    """Directories that the kernel's library is imported from, of another environment."""
    refused: str = ""
    """Why it cannot even be tried."""

    @property
    def kernel_id(self) -> KernelId:
        """As rows know it; of no row for a plan."""
        return KernelId(self.kernel or "", self.environment)


BASELINE = Variant("the model's own", OWN)
"""Behind the same hook as the kernels, whose cost then is on both sides."""


@dataclass(frozen=True)
class Run:
    """One run of the model, as it went."""

    times: RunTimes
    hits: int
    kept: int
    """Calls that `OWN` answered: all of the model's own, those that a plan leaves to it."""
    fallbacks: dict[str, int]
    """Calls by the reason why the model's own attention answered them."""
    copies: int
    """Outputs that had to be copied into another layout."""
    missing: list[str]
    """Modules that a plan names and the model does not have."""
    peak_bytes: int | None
    """Most memory allocated, the model included; None on a CPU."""
    gpu: GpuState | None
    """At the end of the run."""


class ModelProcess:
    """A model in a child process, built when first run and again after a kernel took it down.

    Args:
        python: the interpreter.
        arguments: those of `models.load`.
        timeout: seconds without a sign of life after which the child is ended.
        report: called with what it is at.

    Attributes:
        is_built: whether the model is there; a kernel that ended the process took it along.
        builds: how often the model was built. What a kernel compiled is gone with the process.
    """

    def __init__(
        self,
        python: str,
        arguments: dict[str, Any],
        timeout: float,
        report: Callable[[str], None] = lambda stage: None,
    ) -> None:
        self.builds = 0
        self._process = Process(python, timeout, "replay.end_to_end.model_server")
        self._timeout = timeout
        self._build = {"step": "build", "arguments": arguments}
        self._report = report
        self.is_built = False

    def close(self) -> None:
        self._process.close()

    def build(self) -> None:
        """Build the model, unless it is there.

        Raises:
            ModelRefused: it cannot be built.
        """
        if self.is_built:
            return
        self._process.timeout = max(self._timeout, BUILDING_SECONDS)
        try:
            self._answer(self._build)
        except (Died, CannotStart) as end:
            log = end.log.strip().splitlines()[-1:] if isinstance(end, Died) else []
            raise ModelRefused(": ".join(["the model cannot be built", str(end), *log])) from end
        self._process.timeout = self._timeout
        self.is_built = True
        self.builds += 1

    def run(
        self,
        variant: Variant,
        keep: Path | None = None,
        text: str | None = None,
        save: tuple[Path, str] | None = None,
    ) -> Run:
        """Run the model once.

        Args:
            keep: a `.safetensors` file for the outputs, by name (`models.outputs`).
            text: a language model also reads it, for `text_ids` and `text_logits`; needs `keep`.
            save: a directory, and the model's name there, for outputs to look at; needs `keep`.

        Raises:
            ModelRefused: the model cannot be built.
            RunFailed: the model, or its process, ended early.
        """
        return self._run(
            variant,
            keep=None if keep is None else str(keep),
            text=text,
            save=None if save is None else [str(save[0].resolve()), save[1]],
        )

    def count(self) -> dict[str, Any]:
        """Run the model once, untimed, and count its attention calls as `capture` does.

        Returns:
            The census, as `capture.census.Census.to_json` writes it.

        Raises:
            ModelRefused: the model cannot be built.
            RunFailed: the model, or its process, ended early.
        """
        census: dict[str, Any] = self._step({"step": "count"})["counted"]
        return census

    def look_inside(self, variant: Variant, waits: Mapping[str, float]) -> Run:
        """Run the model once more and time every attention call.

        `replay.end_to_end.model_clock` says how the times differ from those of `run`.

        Args:
            waits: seconds by phase that the host needs for a forward.

        Raises:
            ModelRefused: the model cannot be built.
            RunFailed: the model, or its process, ended early.
        """
        return self._run(variant, waits=dict(waits))

    def _run(
        self,
        variant: Variant,
        *,
        keep: str | None = None,
        text: str | None = None,
        save: list[str] | None = None,
        waits: dict[str, float] | None = None,
    ) -> Run:
        request = {
            "step": "run",
            "name": variant.name,
            "kernel": variant.kernel,
            "plan": None if variant.plan is None else str(variant.plan.resolve()),
            "path": list(variant.path),
            "keep": keep,
            "text": text,
            "save": save,
            "waits": waits,
        }
        ran = self._step(request)["ran"]
        gpu = ran["gpu"]
        return Run(
            times=RunTimes(**ran["times"]),
            **ran["swap"],
            peak_bytes=ran["peak_bytes"],
            gpu=None if gpu is None else rebuilt(GpuState, gpu),
        )

    def _step(self, request: dict[str, Any]) -> dict[str, Any]:
        """What the child answers, the model built before."""
        self.build()
        try:
            return self._answer(request)
        except Died as death:
            self.is_built = False
            raise RunFailed(death.status, str(death), death.log) from death

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        answer: dict[str, Any] = {}
        for message in self._process.ask(**request):
            if "at" in message:
                self._report(message["at"])
            else:
                answer |= message
        if "refused" in answer:
            raise ModelRefused(answer["refused"])
        if "failed" in answer:  # while building, and no refusal: a library's or our own defect
            raise ModelRefused(f"the model cannot be built: {answer['failed']}")
        if "failed_run" in answer:
            raise RunFailed(**answer["failed_run"])
        return answer


def import_path(python: str) -> tuple[str, ...]:
    """Where another interpreter imports from and this one does not.

    Raises:
        ModelRefused: it does not start, or is of another version, whose libraries do not work here.
    """
    question = "import json, sys; print(json.dumps([sys.version_info[:2], sys.path]))"
    try:
        told = subprocess.run([python, "-c", question], capture_output=True, text=True, check=True)
        version, path = json.loads(told.stdout.splitlines()[-1])
    except (OSError, subprocess.CalledProcessError, ValueError, IndexError) as error:
        raise ModelRefused(f"{python} does not say where it imports from: {error}") from error
    if tuple(version) != sys.version_info[:2]:
        raise ModelRefused(
            f"{python} is Python {version[0]}.{version[1]} and this one {sys.version_info[0]}."
            f"{sys.version_info[1]}: a kernel's library must fit the model's Python to work in it"
        )
    return tuple(entry for entry in path if entry and entry not in sys.path)
