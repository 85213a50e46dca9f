"""Choices that make up a replay: calls, kernels, measuring and place. Imports no torch.

The choices are made before PyTorch is imported, because worker processes start before that.
"""

from __future__ import annotations

import ast
import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from capture.large_imports import import_for_good
from capture.storage.arrivals import shown_arrivals
from capture.storage.listing import listed_files
from capture.storage.locations import directory_of
from replay.api.chosen_device import ChoiceError, check_name
from replay.kernels.kernel_names import look_known, parts
from replay.timing.defaults import CALLS_BEFORE_IN_MODELS, CPU_SECONDS, ROUNDS, SECONDS
from replay.workers.environment_options import interpreters
from replay.workloads.call_names import chosen_names

if TYPE_CHECKING:
    import torch

    from capture.call.attention_call import AttentionCall
    from capture.storage.dataset import Dataset
    from replay.accuracy.thresholds import Thresholds
    from replay.bench.settings import Settings
    from replay.timing.timer import Cache
    from replay.workloads.random_calls import Spec
    from replay.workloads.workload import Workload


@dataclass(frozen=True)
class Found:
    """Calls to replay."""

    workloads: list[Workload]
    note: str = ""
    """A warning about how a recording was read; usually empty."""
    specs: list[Spec] = field(default_factory=list)
    """Sizes of calls that are drawn, which may be too large for a machine."""


class CallChoice(Protocol):
    """A choice of calls."""

    def check(self) -> None:
        """Raise Error for a mistake that can be found in a fraction of a second."""

    def opened(self, *, quiet: bool) -> Dataset | None:
        """Open the recording; None if the calls are not recorded."""

    def found(self, dataset: Dataset | None, *, quiet: bool) -> Found:
        """Return the calls, given the open recording."""


@dataclass(frozen=True)
class RecordedCalls:
    """Calls of a recording."""

    where: str
    """A directory that `capture` wrote, an archive of one, or an address."""
    names: str | None = None
    """Only the calls of these names and globs, with commas between them."""
    join_ranks: bool = False
    """Replay the calls that ranks of a distributed model share, each as a whole."""
    versus_random: bool = False
    """Replay each call beside random and moment-matched values."""
    dataset: Dataset | None = None
    """The recording, if it is open already."""

    def check(self) -> None:
        """Raise Error if there is no such recording, or no call of these names."""
        if self.dataset is not None:
            return
        directory = directory_of(self.where)
        if directory is None or self.names is None or self.join_ranks:
            return
        if files := listed_files(directory):
            # A damaged entry goes by its whole file name, which only its header could shorten.
            chosen_names([Path(file).stem for file in files], self.names, files)

    def opened(self, *, quiet: bool) -> Dataset | None:
        """Open the recording."""
        from capture.storage.dataset import Dataset

        if self.dataset is not None:
            return self.dataset
        with shown_arrivals(quiet=quiet) as report:
            return Dataset.open(self.where, report=report)

    def found(self, dataset: Dataset | None, *, quiet: bool) -> Found:
        """Return the recorded calls, with their random counterparts if these are wanted."""
        from replay.workloads.recorded import from_dataset
        from replay.workloads.workload import with_counterparts

        assert dataset is not None
        with shown_arrivals(quiet=quiet) as report:
            recorded, note = from_dataset(
                dataset, self.names, join_ranks=self.join_ranks, report=report
            )
        return Found(with_counterparts(recorded, 0) if self.versus_random else recorded, note)


@dataclass(frozen=True)
class CallsInMemory:
    """Calls of this program, written to a directory so that worker processes can read them."""

    calls: tuple[AttentionCall, ...]
    directory: Path
    """An empty directory, which stays until the replay has ended."""

    def check(self) -> None:
        """Raise ChoiceError if there is no call."""
        if not self.calls:
            raise ChoiceError("there is no call to replay: give at least one")

    def opened(self, *, quiet: bool) -> Dataset | None:
        """Write the calls, and open what was written."""
        from capture.storage.call_file import PackedCall
        from capture.storage.dataset import Dataset

        dataset = Dataset(self.directory, [], [])
        for index, call in enumerate(self.calls):
            name = f"{call.origin.model or 'call'}-{index:06d}.safetensors"
            dataset.entries.append(PackedCall.of(call).write(self.directory / name))
        return dataset

    def found(self, dataset: Dataset | None, *, quiet: bool) -> Found:
        """Return the calls as they were written."""
        return RecordedCalls(str(self.directory)).found(dataset, quiet=quiet)


@dataclass(frozen=True)
class RandomValues:
    """The values of calls that are drawn."""

    is_causal: bool = False
    mask: str = "none"
    """One of `replay.workloads.random_masks.MASKS`, or `causal`."""
    scale: float | None = None
    distribution: str = "normal"
    dtype: str = "bfloat16"
    seed: int = 0

    def of(self, spec: Spec) -> Spec:
        """Return a shape with these values."""
        return replace(
            spec,
            is_causal=spec.is_causal or self.is_causal or self.mask == "causal",
            mask="none" if self.mask == "causal" else self.mask,
            scale=self.scale,
            distribution=self.distribution,
        )


@dataclass(frozen=True)
class RandomCall:
    """One call of any shape; sizes as in `replay.workloads.random_calls.Spec`."""

    batch: int
    q_heads: int
    kv_heads: int | None
    """None for as many as query heads."""
    q_len: int
    kv_len: int | None
    """None for the query length."""
    head_dim: int
    v_head_dim: int | None
    """None for `head_dim`."""
    values: RandomValues = RandomValues()

    def check(self) -> None:
        """Check nothing: the sizes are checked when the call is drawn."""

    def opened(self, *, quiet: bool) -> Dataset | None:
        """Return None: nothing is recorded."""
        return None

    def found(self, dataset: Dataset | None, *, quiet: bool) -> Found:
        """Return the call."""
        from replay.workloads import random_calls
        from replay.workloads.workload import random_workloads

        spec = random_calls.Spec(
            batch=self.batch,
            q_heads=self.q_heads,
            kv_heads=self.q_heads if self.kv_heads is None else self.kv_heads,
            q_len=self.q_len,
            kv_len=self.q_len if self.kv_len is None else self.kv_len,
            head_dim=self.head_dim,
            v_head_dim=self.head_dim if self.v_head_dim is None else self.v_head_dim,
            dtype=random_calls.dtype(self.values.dtype),
        )
        specs = [self.values.of(spec)]
        return Found(random_workloads("random", specs, self.values.seed), specs=specs)


@dataclass(frozen=True)
class SuiteCalls:
    """Calls of a published list of shapes."""

    name: str
    longest: int | None = None
    """Leave out longer shapes."""
    values: RandomValues = RandomValues()

    def check(self) -> None:
        """Check nothing: the list is read when its calls are drawn."""

    def opened(self, *, quiet: bool) -> Dataset | None:
        """Return None: nothing is recorded."""
        return None

    def found(self, dataset: Dataset | None, *, quiet: bool) -> Found:
        """Return the calls of the list."""
        from replay.workloads import random_calls
        from replay.workloads.workload import random_workloads

        shapes = random_calls.suite(self.name, self.values.dtype, self.longest)
        specs = [self.values.of(spec) for spec in shapes]
        return Found(random_workloads(self.name, specs, self.values.seed), specs=specs)


@dataclass(frozen=True)
class MeasureChoice:
    """Settings of timing and judging, before the device is known."""

    cache: Cache | None = None
    """None for cold on a GPU, warm on a CPU."""
    rounds: int = ROUNDS
    calls_before: int | None = None
    """None for 0, or in models on a GPU for `CALLS_BEFORE_IN_MODELS`."""
    max_seconds: float | None = None
    """None for `SECONDS`, on a CPU for `CPU_SECONDS`."""
    max_noise: float | None = None
    baseline: str | None = None
    errors_against: str = "reference"
    metrics: tuple[str, ...] = ()
    """Figures that are measured only on request: `energy`, `roofline`, `stats`, `resources`."""
    save_output: Path | None = None
    tolerances: Path | Thresholds | None = None
    for_model: bool = False
    """Measure as in a model, for a plan or a check of the model."""
    seed: int = 0

    def settings(self, device: torch.device) -> Settings:
        """Return the settings of a replay on this device.

        Raises:
            ChoiceError: a choice cannot be used on this device.
            Error: a file cannot be read.
        """
        from replay.bench.settings import Settings
        from replay.end_to_end.model_process import OWN

        is_gpu = device.type == "cuda"
        if self.cache == "cold" and not is_gpu:
            raise ChoiceError(
                "--cache cold requires a GPU: leave it out, CPU caches are always warm"
            )
        calls_before = self.calls_before
        if calls_before is None:
            calls_before = CALLS_BEFORE_IN_MODELS if self.for_model and is_gpu else 0
        return Settings(
            device=device,
            cache=self.cache or ("cold" if is_gpu else "warm"),
            rounds=self.rounds,
            calls_before=calls_before,
            max_seconds=self.max_seconds or (SECONDS if is_gpu else CPU_SECONDS),
            max_noise=self.max_noise,
            seed=self.seed,
            baseline=self.baseline or (OWN if self.for_model else None),
            errors_against=self.errors_against,
            compare_stats="stats" in self.metrics,
            for_model=self.for_model,
            energy=is_gpu and "energy" in self.metrics,
            roofline="roofline" in self.metrics,
            resources="resources" in self.metrics,
            save_output=None if self.save_output is None else _made(self.save_output),
            tolerances=thresholds(self.tolerances),
        )


@dataclass(frozen=True)
class RunPlace:
    """Device, environments and processes that kernels run in."""

    device: str | None = None
    """None for a GPU if there is one."""
    gpus: str | None = None
    """`all`, or indices with commas between them: spread the calls over these GPUs."""
    ray: str | None = None
    """Address of a Ray cluster: spread the calls over its devices."""
    environments: tuple[str, ...] = ()
    """Other Python environments: `NAME=PYTHON`, or a TOML file with a table `[environments]`."""
    timeout: float = 300.0
    """Seconds without a sign of life after which a worker is ended."""
    in_process: bool = False
    """Run kernels in this process, without workers."""

    def __post_init__(self) -> None:
        several = "--gpus" if self.gpus is not None else "--ray" if self.ray is not None else ""
        if several and self.in_process:
            raise ChoiceError(f"{several} measures in worker processes: leave out --in-process")
        if self.environments and self.in_process:
            raise ChoiceError(
                "environments require worker processes: leave out --in-process or --env"
            )

    def interpreters(self) -> dict[str, str]:
        """Return the interpreters of the other environments, by name.

        Raises:
            WorkerError: an environment cannot be used.
        """
        return interpreters(self.environments, are_here=self.ray is None)


@dataclass(frozen=True)
class ReplayRequest:
    """Calls to replay, and all choices about how."""

    calls: CallChoice
    kernels: str | None = None
    """Names and globs with commas between them; None for the default ones, `all` for all."""
    measure: MeasureChoice = MeasureChoice()
    place: RunPlace = RunPlace()
    max_time: float | None = None
    """Seconds after which the replay ends."""
    resume: Path | None = None
    """File of rows to complete."""

    def __post_init__(self) -> None:
        if self.max_time is not None and self.place.in_process:
            raise ChoiceError("--max-time ends a replay in workers: leave out --in-process")
        if self.measure.save_output is not None and self.place.ray is not None:
            raise ChoiceError("--save-output writes where kernels run: leave out --ray")

    def check(self) -> None:
        """Raise the errors of a replay that can be found in a fraction of a second.

        PyTorch is imported only if a name of a device or a kernel looks wrong.

        Raises:
            Error: a choice cannot be used.
        """
        check_name(self.place.device)
        self.calls.check()
        self._check_kernels()
        self.place.interpreters()

    def _check_kernels(self) -> None:
        names = special_kernels(self.measure)
        patterns = ",".join(filter(None, (self.kernels, *names)))
        if not self.place.environments:  # the Python of another one may be newer
            for name in parts(patterns):
                _require_python(name)
        if look_known(patterns):
            return
        import_for_good("torch")
        from replay.kernels.registry import find, select

        select(self.kernels)
        for name in names:
            find(name)


def special_kernels(measure: MeasureChoice) -> list[str]:
    """Return the kernels that serve as baseline, or whose output others are compared with."""
    names = (measure.baseline, measure.errors_against)
    return [name for name in names if name not in (None, "reference", "captured")]


def thresholds(given: str | os.PathLike[str] | Thresholds | None) -> Thresholds:
    """Return the constants that accuracy is judged by; without a file, the project's own.

    Raises:
        Error: the file cannot be read.
    """
    from replay.accuracy.thresholds import Thresholds

    if given is None:
        return Thresholds()
    return given if isinstance(given, Thresholds) else Thresholds.read(Path(given))


def _made(directory: Path) -> Path:
    """Make a directory and return its absolute path: kernels may change the current one."""
    directory = directory.absolute()
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ChoiceError(
            f"cannot write --save-output {directory} ({error.strerror}): name another directory"
        ) from error
    return directory


def joined_names(names: str | Sequence[Any] | None) -> str | None:
    """Return names of kernels or calls as one text with commas between them."""
    if names is None or isinstance(names, str):
        return names
    return ",".join(str(getattr(name, "name", name)) for name in names)


def _require_python(name: str) -> None:
    """Raise ChoiceError if the file of a user's kernel cannot be parsed; nothing of it is run."""
    path, _, _ = name.rpartition(":")
    if not path.endswith(".py"):
        return
    try:
        with contextlib.suppress(OSError, ValueError, RecursionError):
            ast.parse(Path(path).read_bytes())
    except SyntaxError as error:
        raise ChoiceError(
            f"no kernel {name!r}: {path}, line {error.lineno}: {error.msg}"
        ) from error
