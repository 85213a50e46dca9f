"""Function `reproduce`, which writes a minimal dataset and a script to show a kernel's failure."""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from replay.api.choices import thresholds
from replay.api.chosen_device import ChoiceError, device_of
from replay.api.messages import say, shown_steps
from replay.api.replay_calls import call_choice

if TYPE_CHECKING:
    import torch

    from capture.storage.dataset import Dataset
    from replay.accuracy.thresholds import Thresholds
    from replay.reproduce.reproducer import Reproduced
    from replay.workloads.workload import Workload

SECONDS = 120.0
"""Default time limit, in seconds, of the search for the smallest failing part of a call."""


def reproduce(
    dataset: str | os.PathLike[str] | Dataset,
    call: str,
    kernel: str,
    out: str | os.PathLike[str],
    *,
    device: str | torch.device | None = None,
    python: str = sys.executable,
    max_seconds: float = SECONDS,
    timeout: float = 300.0,
    tolerances: str | os.PathLike[str] | Thresholds | None = None,
    progress: bool | None = None,
) -> Reproduced:
    """Write the smallest failing part of a call for a kernel, and a script that shows the failure.

    The script needs only PyTorch and the kernel's library.

    Args:
        dataset: a directory that `capture` wrote, an archive of one, an address, or a dataset.
        call: the call's name, such as `llama-000003`.
        kernel: the kernel's name, or `FILE.py:FUNCTION`.
        out: a new directory.
        device: "cpu", "cuda" or "cuda:1"; by default a GPU if there is one.
        python: interpreter of the environment that the kernel runs in.
        max_seconds: time limit of the search for the smallest failing part.
        timeout: seconds after which a hanging kernel is killed.
        tolerances: constants for judging accuracy, or a TOML file of constants.
        progress: False to hide progress on stderr.

    Returns:
        The kernel's failure on the whole call and on the smallest part. `smallest` is None, and
        nothing is written, if the kernel does not fail.

    Raises:
        Error: an argument cannot be used, the failure is intermittent, or `out` cannot be written.

    Example:
        >>> reproduce("captured_inputs", "llama-000003", "sage1", "bug")
    """
    from replay.bench.settings import Settings
    from replay.kernels.registry import find
    from replay.reproduce.reproducer import Reproduction
    from replay.reproduce.reproducer import reproduce as write_smallest

    quiet = progress is False
    found = find(kernel)
    settings = Settings(
        device=device_of(None if device is None else str(device)),
        cache="warm",
        rounds=1,
        max_seconds=0.01,
        tolerances=thresholds(tolerances),
    )
    workload = _one_call(dataset, call, quiet=quiet)
    request = Reproduction(workload, found.name, settings, max_seconds, timeout, python)
    with _shown(quiet=quiet) as report:
        return write_smallest(request, Path(out), report)


def _one_call(dataset: str | os.PathLike[str] | Dataset, name: str, *, quiet: bool) -> Workload:
    """Return the recorded call that has this name.

    Raises:
        ChoiceError: several calls match the name.
        DatasetError: no call has that name, or the dataset cannot be read.
    """
    with call_choice(dataset, name) as choice:
        found = choice.found(choice.opened(quiet=quiet), quiet=quiet)
    if found.note:
        say(found.note)
    calls = found.workloads
    if len(calls) != 1:
        names = ", ".join(workload.name for workload in calls[:3]) + " …" * (len(calls) > 3)
        raise ChoiceError(f"--call {name} is {len(calls)} calls ({names}): name one")
    return calls[0]


@contextmanager
def _shown(*, quiet: bool) -> Iterator[Callable[[str], None]]:
    """Show the current step on a terminal; yield the function that sets this step."""
    began, steps = time.monotonic(), itertools.count(1)
    with shown_steps(quiet=quiet) as show:

        def report(line: str) -> None:
            taken = time.monotonic() - began
            show(f"{line} · step {next(steps)} · {taken:.0f} s")

        yield report
