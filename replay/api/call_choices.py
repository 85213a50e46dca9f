"""Ways to choose a replay's calls: recorded, in memory, random, or a suite. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from capture.errors import DatasetError
from capture.storage.arrivals import shown_arrivals
from capture.storage.listing import listed_files
from capture.storage.locations import directory_of, where_instead
from capture.storage.names import is_of_dataset
from replay.api.chosen_device import ChoiceError
from replay.workloads.call_names import chosen_names
from replay.workloads.call_sizes import Sizes, combinations
from replay.workloads.suites import name_of, sizes_of

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


class CallChoice:
    """Base class of every choice of calls."""

    def check(self) -> None:
        """Raise Error for mistakes that can be found in a fraction of a second."""

    def opened(self, *, quiet: bool) -> Dataset | None:
        """Open the recording; None if the calls are not recorded."""
        return None

    def found(self, dataset: Dataset | None, *, quiet: bool) -> ChosenCalls:
        """Return the calls to replay; `dataset` is the open recording, if any."""
        raise NotImplementedError


@dataclass(frozen=True)
class RecordedCalls(CallChoice):
    """Calls of a recording."""

    where: str
    """Directory written by `capture`, an archive of one, or an address."""
    names: str | None = None
    """Comma-separated names and globs of the calls to use; None for all calls."""
    join_ranks: bool = False
    """True to join the parts of a call that several ranks recorded, and replay the whole call."""
    versus_random: bool = False
    """True to replay each call also with random values and with moment-matched values."""
    dataset: Dataset | None = None
    """The recording, if it is already open."""

    def check(self) -> None:
        if self.dataset is not None:
            return
        directory = directory_of(self.where)
        if directory is not None and not any(map(is_of_dataset, os.listdir(directory))):
            raise DatasetError(f"{self.where}: holds no recorded calls{where_instead(directory)}")
        if directory is None or self.names is None or self.join_ranks:
            return
        if files := listed_files(directory):
            # A damaged file has no readable header, so its call is chosen by the whole file name.
            chosen_names([Path(file).stem for file in files], self.names, files)

    def opened(self, *, quiet: bool) -> Dataset | None:
        from capture.storage.dataset import Dataset

        if self.dataset is not None:
            return self.dataset
        with shown_arrivals(quiet=quiet) as report:
            return Dataset.open(self.where, report=report)

    def found(self, dataset: Dataset | None, *, quiet: bool) -> ChosenCalls:
        from replay.workloads.recorded import from_dataset
        from replay.workloads.workload import with_counterparts

        assert dataset is not None
        with shown_arrivals(quiet=quiet) as report:
            recorded, note = from_dataset(
                dataset, self.names, join_ranks=self.join_ranks, report=report
            )
        return ChosenCalls(with_counterparts(recorded, 0) if self.versus_random else recorded, note)


@dataclass(frozen=True)
class CallsInMemory(CallChoice):
    """Calls of this program, written to a directory so that worker processes can read them."""

    calls: tuple[AttentionCall, ...]
    directory: Path
    """Directory for the calls, empty at first; it must exist until the replay ends."""

    def check(self) -> None:
        if not self.calls:
            raise ChoiceError("there is no call to replay: give at least one")

    def opened(self, *, quiet: bool) -> Dataset | None:
        # Write the calls to files, because worker processes cannot read them from memory.
        from capture.storage.call_file import PackedCall
        from capture.storage.dataset import Dataset

        dataset = Dataset(self.directory, [], [])
        for index, call in enumerate(self.calls):
            model = (call.origin.model or "call").replace("/", "-")
            name = f"{model}-{index:06d}.safetensors"
            dataset.entries.append(PackedCall.of(call).write(self.directory / name))
        return dataset

    def found(self, dataset: Dataset | None, *, quiet: bool) -> ChosenCalls:
        return RecordedCalls(str(self.directory)).found(dataset, quiet=quiet)


@dataclass(frozen=True, kw_only=True)
class RandomValues(CallChoice):
    """Choice of random calls' values; subclasses choose the shapes."""

    mask: str = "none"
    """One of `replay.workloads.random_masks.MASKS`, or `causal`."""
    distribution: str = "normal"
    dtype: str = "bfloat16"
    seed: int = 0

    def _calls(self, name: str, shapes: Sequence[Spec]) -> ChosenCalls:
        """Return random calls of these shapes."""
        from replay.workloads.workload import random_workloads

        is_causal = self.mask == "causal"
        specs = [
            replace(
                spec,
                is_causal=spec.is_causal or is_causal,
                mask="none" if is_causal else self.mask,
                distribution=self.distribution,
            )
            for spec in shapes
        ]
        return ChosenCalls(random_workloads(name, specs, self.seed), specs=specs)


@dataclass(frozen=True, kw_only=True)
class RandomCalls(RandomValues):
    """Random calls of any shapes: one for each combination of the sizes.

    The sizes are those of `replay.workloads.call_sizes.combinations`.
    """

    batch: tuple[int, ...] = (1,)
    q_heads: tuple[int, ...] = (16,)
    kv_heads: tuple[int, ...] | None = None
    """Numbers of key heads; None for the number of query heads."""
    q_len: tuple[int, ...] = (1024,)
    kv_len: tuple[int, ...] | None = None
    """Key lengths; None for the query length."""
    head_dim: tuple[int, ...] = (64,)
    v_head_dim: tuple[int, ...] | None = None
    """Head dimensions of the value; None for `head_dim`."""

    def check(self) -> None:
        self._sizes()

    def found(self, dataset: Dataset | None, *, quiet: bool) -> ChosenCalls:
        from replay.workloads import random_calls

        dtype = random_calls.dtype(self.dtype)
        specs = [random_calls.Spec(**vars(sizes), dtype=dtype) for sizes in self._sizes()]
        return self._calls("random", specs)

    def _sizes(self) -> list[Sizes]:
        return combinations(
            batch=self.batch,
            q_heads=self.q_heads,
            kv_heads=self.kv_heads,
            q_len=self.q_len,
            kv_len=self.kv_len,
            head_dim=self.head_dim,
            v_head_dim=self.v_head_dim,
        )


@dataclass(frozen=True, kw_only=True)
class SuiteCalls(RandomValues):
    """Calls of a published list of shapes, or of one in a file."""

    suite: str
    """Name of a published suite, or path of a `.toml` file."""
    max_seq: int | None = None
    """Maximum sequence length; longer shapes are left out."""

    def check(self) -> None:
        sizes_of(self.suite, self.max_seq)

    def found(self, dataset: Dataset | None, *, quiet: bool) -> ChosenCalls:
        from replay.workloads import random_calls

        shapes = random_calls.suite(self.suite, self.dtype, self.max_seq)
        return self._calls(name_of(self.suite), shapes)
