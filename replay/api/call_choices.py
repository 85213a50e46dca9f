"""Choices of calls for a replay: recorded, in memory, random, or from a suite. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from capture.storage.arrivals import shown_arrivals
from capture.storage.listing import listed_files
from capture.storage.locations import directory_of
from replay.api.chosen_device import ChoiceError
from replay.workloads.call_names import chosen_names

if TYPE_CHECKING:
    from capture.call.attention_call import AttentionCall
    from capture.storage.dataset import Dataset
    from replay.workloads.random_calls import Spec
    from replay.workloads.workload import Workload


@dataclass(frozen=True)
class ChosenCalls:
    """Calls to replay."""

    workloads: list[Workload]
    note: str = ""
    """Warning about how a recording was read; usually empty."""
    specs: list[Spec] = field(default_factory=list)
    """Sizes of random calls, which may be too large for a machine."""


class CallChoice(Protocol):
    """Interface of every choice of calls."""

    def check(self) -> None:
        """Raise Error for a mistake that can be found in a fraction of a second."""

    def opened(self, *, quiet: bool) -> Dataset | None:
        """Open the recording; None if the calls are not recorded."""

    def found(self, dataset: Dataset | None, *, quiet: bool) -> ChosenCalls:
        """Return the calls, given the open recording."""


@dataclass(frozen=True)
class RecordedCalls:
    """Calls of a recording."""

    where: str
    """Directory written by `capture`, an archive of one, or an address."""
    names: str | None = None
    """Comma-separated names and globs of the calls to use; None for all calls."""
    join_ranks: bool = False
    """True to replay calls that ranks of a distributed model share, each as a whole."""
    versus_random: bool = False
    """True to replay each call with random and moment-matched values too."""
    dataset: Dataset | None = None
    """The recording, if it is already open."""

    def check(self) -> None:
        """Raise Error if the recording does not exist, or if no call has one of the names."""
        if self.dataset is not None:
            return
        directory = directory_of(self.where)
        if directory is None or self.names is None or self.join_ranks:
            return
        if files := listed_files(directory):
            # A damaged entry is matched by its whole file name, which only its header could
            # shorten.
            chosen_names([Path(file).stem for file in files], self.names, files)

    def opened(self, *, quiet: bool) -> Dataset | None:
        """Open the recording."""
        from capture.storage.dataset import Dataset

        if self.dataset is not None:
            return self.dataset
        with shown_arrivals(quiet=quiet) as report:
            return Dataset.open(self.where, report=report)

    def found(self, dataset: Dataset | None, *, quiet: bool) -> ChosenCalls:
        """Return the recorded calls, with their random counterparts if requested."""
        from replay.workloads.recorded import from_dataset
        from replay.workloads.workload import with_counterparts

        assert dataset is not None
        with shown_arrivals(quiet=quiet) as report:
            recorded, note = from_dataset(
                dataset, self.names, join_ranks=self.join_ranks, report=report
            )
        return ChosenCalls(with_counterparts(recorded, 0) if self.versus_random else recorded, note)


@dataclass(frozen=True)
class CallsInMemory:
    """Calls of this program, written to a directory so that worker processes can read them."""

    calls: tuple[AttentionCall, ...]
    directory: Path
    """Empty directory that must exist until the replay has ended."""

    def check(self) -> None:
        """Raise ChoiceError if there are no calls."""
        if not self.calls:
            raise ChoiceError("there is no call to replay: give at least one")

    def opened(self, *, quiet: bool) -> Dataset | None:
        """Write the calls to files, and open these as a dataset."""
        from capture.storage.call_file import PackedCall
        from capture.storage.dataset import Dataset

        dataset = Dataset(self.directory, [], [])
        for index, call in enumerate(self.calls):
            model = (call.origin.model or "call").replace("/", "-")
            name = f"{model}-{index:06d}.safetensors"
            dataset.entries.append(PackedCall.of(call).write(self.directory / name))
        return dataset

    def found(self, dataset: Dataset | None, *, quiet: bool) -> ChosenCalls:
        """Return the calls as they were written."""
        return RecordedCalls(str(self.directory)).found(dataset, quiet=quiet)


@dataclass(frozen=True)
class RandomValues:
    """Values of random calls."""

    is_causal: bool = False
    mask: str = "none"
    """One of `replay.workloads.random_masks.MASKS`, or `causal`."""
    scale: float | None = None
    distribution: str = "normal"
    dtype: str = "bfloat16"
    seed: int = 0

    def of(self, spec: Spec) -> Spec:
        """Return the spec of a shape with these values."""
        return replace(
            spec,
            is_causal=spec.is_causal or self.is_causal or self.mask == "causal",
            mask="none" if self.mask == "causal" else self.mask,
            scale=self.scale,
            distribution=self.distribution,
        )


@dataclass(frozen=True)
class RandomCall:
    """One random call of any shape; the sizes are those of `replay.workloads.random_calls.Spec`."""

    batch: int
    q_heads: int
    kv_heads: int | None
    """Number of key heads; None for the number of query heads."""
    q_len: int
    kv_len: int | None
    """Key length; None for the query length."""
    head_dim: int
    v_head_dim: int | None
    """Head dimension of the value; None for `head_dim`."""
    values: RandomValues = RandomValues()

    def check(self) -> None:
        """Check nothing: the sizes are checked when the call is created."""

    def opened(self, *, quiet: bool) -> Dataset | None:
        """Return None, because nothing is recorded."""
        return None

    def found(self, dataset: Dataset | None, *, quiet: bool) -> ChosenCalls:
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
        return ChosenCalls(random_workloads("random", specs, self.values.seed), specs=specs)


@dataclass(frozen=True)
class SuiteCalls:
    """Calls of a published list of shapes."""

    name: str
    longest: int | None = None
    """Maximum length; longer shapes are left out."""
    values: RandomValues = RandomValues()

    def check(self) -> None:
        """Check nothing: the list is read when its calls are created."""

    def opened(self, *, quiet: bool) -> Dataset | None:
        """Return None, because nothing is recorded."""
        return None

    def found(self, dataset: Dataset | None, *, quiet: bool) -> ChosenCalls:
        """Return the calls of the list."""
        from replay.workloads import random_calls
        from replay.workloads.workload import random_workloads

        shapes = random_calls.suite(self.name, self.values.dtype, self.longest)
        specs = [self.values.of(spec) for spec in shapes]
        return ChosenCalls(random_workloads(self.name, specs, self.values.seed), specs=specs)
