"""Choices that make up a replay: calls, kernels, settings and place. Imports no torch.

Worker processes start before this process imports PyTorch, so the choices must not need it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any

from attention_replay.errors import check_type
from capture.storage.plain_files import possible
from replay.api.call_choices import CallChoice
from replay.api.chosen_device import ChoiceError, check_name
from replay.api.chosen_kernels import check_kernels
from replay.timing.defaults import CALLS_BEFORE_IN_MODELS, CPU_SECONDS, ROUNDS, SECONDS
from replay.workers.environment_options import interpreters

if TYPE_CHECKING:
    import torch

    from replay.accuracy.thresholds import Thresholds
    from replay.bench.settings import Settings
    from replay.timing.timer import Cache


@dataclass(frozen=True)
class MeasureChoice:
    """Settings of timing and judging, chosen before the device is known."""

    cache: Cache | None = None
    """State of the cache; None for cold on a GPU, warm on a CPU."""
    rounds: int = ROUNDS
    calls_before: int | None = None
    """Untimed calls before each sample; by default 0, or `CALLS_BEFORE_IN_MODELS` if `for_model` is
    set on a GPU."""
    max_seconds: float | None = None
    """Time limit per kernel and call; by default `SECONDS` on a GPU, `CPU_SECONDS` on a CPU."""
    baseline: str | None = None
    errors_against: str = "reference"
    metrics: tuple[str, ...] = ()
    """Figures measured only on request: `energy`, `roofline`, `stats`, `resources`."""
    save_output: str | os.PathLike[str] | None = None
    tolerances: str | os.PathLike[str] | Thresholds | None = None
    backward: bool = False
    """True to judge and time the backward passes of kernels too."""
    for_model: bool = False
    """True to measure as in a model, for a plan or a check of the model."""
    seed: int = 0

    @property
    def special_kernels(self) -> list[str]:
        """Return the kernels that serve as baseline, or whose outputs others are compared with."""
        names = (self.baseline, self.errors_against)
        return [name for name in names if name not in (None, "reference", "captured")]

    @cached_property
    def thresholds(self) -> Thresholds:
        """Thresholds for judging accuracy, read once, because their file may be a pipe.

        Raises:
            ThresholdsError: the file cannot be read or used.
        """
        return thresholds(self.tolerances)

    def check(self, device: str | None) -> None:
        """Raise Error for a choice that cannot be used on this device; imports no torch."""
        _ = self.thresholds
        if self.cache == "cold" and device == "cpu":
            raise ChoiceError(
                "--cache cold requires a GPU: leave it out, CPU caches are always warm"
            )

    def settings(self, device: torch.device) -> Settings:
        """Return the settings of a replay on this device.

        Raises:
            ChoiceError: a choice cannot be used on this device.
            Error: a file cannot be read.
        """
        from replay.bench.settings import Settings

        self.check(device.type)
        is_gpu = device.type == "cuda"
        calls_before = self.calls_before
        if calls_before is None:
            calls_before = CALLS_BEFORE_IN_MODELS if self.for_model and is_gpu else 0
        return Settings(
            device=device,
            cache=self.cache or ("cold" if is_gpu else "warm"),
            rounds=self.rounds,
            calls_before=calls_before,
            max_seconds=self.max_seconds or (SECONDS if is_gpu else CPU_SECONDS),
            seed=self.seed,
            baseline=self.baseline,
            errors_against=self.errors_against,
            compare_stats="stats" in self.metrics,
            for_model=self.for_model,
            backward=self.backward,
            energy=is_gpu and "energy" in self.metrics,
            roofline="roofline" in self.metrics,
            resources="resources" in self.metrics,
            save_output=None if self.save_output is None else _made(Path(self.save_output)),
            tolerances=self.thresholds,
        )


@dataclass(frozen=True)
class RunPlace:
    """Device, environments and processes that kernels run in."""

    device: str | None = None
    """Name of the device; None for a GPU if present."""
    gpus: str | None = None
    """GPUs to spread the calls over: `all`, or comma-separated indices."""
    ray: str | None = None
    """Address of a Ray cluster to spread the calls over."""
    env: tuple[str, ...] = ()
    """Other Python environments: `NAME=PYTHON`, or a TOML file with a table `[environments]`."""
    timeout: float = 300.0
    """Seconds after which a worker that gives no sign of life is killed."""
    in_process: bool = False
    """True to run kernels in this process, without workers."""

    def __post_init__(self) -> None:
        for name in ("gpus", "ray", "env"):
            if self.in_process and getattr(self, name):
                raise ChoiceError(f"--{name} requires worker processes: leave out --in-process")

    def interpreters(self) -> dict[str, str]:
        """Return the interpreters of the other environments, by name.

        Raises:
            WorkerError: an environment cannot be used.
        """
        return interpreters(self.env, are_here=self.ray is None)


@dataclass(frozen=True)
class ReplayRequest:
    """Calls to replay, and all choices that make up the replay."""

    calls: CallChoice
    kernels: str | None = None
    """Comma-separated kernel names and globs; None for the default kernels, `all` for every one."""
    measure: MeasureChoice = MeasureChoice()
    place: RunPlace = RunPlace()
    max_time: float | None = None
    """Seconds after which the replay ends."""
    resume: Path | None = None
    """File with the rows of an earlier replay to continue."""

    def __post_init__(self) -> None:
        if self.max_time is not None and self.place.in_process:
            raise ChoiceError("--max-time requires worker processes: leave out --in-process")
        if self.measure.save_output is not None and self.place.ray is not None:
            raise ChoiceError("--save-output requires kernels on this machine: leave out --ray")

    def check(self) -> None:
        """Raise Error for mistakes that can be found in a fraction of a second.

        PyTorch is imported only if the name of a kernel seems wrong.

        Raises:
            Error: a choice cannot be used.
        """
        check_name(self.place.device)
        self.calls.check()
        self.measure.check(self.place.device)
        check_kernels(self.kernels, self.measure.special_kernels, parse_files=not self.place.env)
        self.place.interpreters()


def thresholds(given: str | os.PathLike[str] | Thresholds | None) -> Thresholds:
    """Return the constants for judging accuracy, from a file or else the project's own.

    Raises:
        Error: the file cannot be read.
    """
    from replay.accuracy.thresholds import Thresholds

    if given is None:
        return Thresholds()
    return given if isinstance(given, Thresholds) else Thresholds.read(Path(given))


def _made(directory: Path) -> Path:
    """Create a directory; return its absolute path, as kernels may change the current directory."""
    directory = directory.absolute()
    try:
        possible(directory).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ChoiceError(
            f"cannot write --save-output {directory} ({error.strerror}): name another directory"
        ) from error
    return directory


def joined_names(names: str | Sequence[Any] | None) -> str | None:
    """Return names of kernels or calls as one comma-separated string."""
    if names is None or isinstance(names, str):
        return names
    check_type("kernels or calls", names, (Iterable,), "a text or a list of names")
    if functions := [name for name in names if isinstance(name, FunctionType)]:
        raise ChoiceError(
            f"kernels have names: register {functions[0].__name__} with register_kernel"
        )
    return ",".join(str(getattr(name, "name", name)) for name in names)
