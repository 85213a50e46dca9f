"""Function `replay`, which runs kernels on calls, as the command does."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from replay.api.call_choices import CallChoice, CallsInMemory, RecordedCalls
from replay.api.choices import MeasureChoice, ReplayRequest, RunPlace, joined_names
from replay.api.chosen_device import ChoiceError
from replay.api.messages import say
from replay.api.session import Session
from replay.timing.defaults import ROUNDS

if TYPE_CHECKING:
    from capture.call.attention_call import AttentionCall
    from replay.accuracy.thresholds import Thresholds
    from replay.api.measured_rows import Rows
    from replay.kernels.registry import Kernel
    from replay.timing.timer import Cache


def replay(
    dataset: str | os.PathLike[str] | Iterable[AttentionCall],
    *,
    kernels: str | Sequence[str | Kernel] | None = None,
    calls: str | Sequence[str] | None = None,
    join_ranks: bool = False,
    versus_random: bool = False,
    backward: bool = False,
    device: str | None = None,
    cache: Cache | None = None,
    rounds: int = ROUNDS,
    calls_before: int | None = None,
    max_seconds: float | None = None,
    max_time: float | None = None,
    baseline: str | None = None,
    errors_against: str = "reference",
    metrics: Sequence[str] = (),
    tolerances: str | os.PathLike[str] | Thresholds | None = None,
    save_output: str | os.PathLike[str] | None = None,
    gpus: str | Sequence[int] | None = None,
    ray: str | None = None,
    env: Mapping[str, str] | Sequence[str] | None = None,
    workers: bool = True,
    timeout: float = 300.0,
    progress: bool | None = None,
    for_model: bool = False,
) -> Rows:
    """Run kernels on calls, in worker processes, and return a row for each kernel and call.

    A script needs `if __name__ == "__main__"` only if it registers a kernel, because worker
    processes import the script then.

    Args:
        dataset: a directory that `capture` wrote, an archive of one, an address, an open dataset,
            or calls.
        kernels: names and globs, as a list or comma-separated; None for the default kernels, "all"
            for every kernel. `FILE.py:FUNCTION` is a kernel of your own.
        calls: names and globs of the calls to replay; None for all calls.
        join_ranks: join the parts of a call that several ranks recorded, and replay the whole call.
        versus_random: replay each call also with random values and with moment-matched values.
        backward: also judge the gradients of each kernel, and time its backward pass. It starts
            from the recorded gradient of the output, or from random values.
        device: "cpu", "cuda" or "cuda:1"; None for a GPU if present.
        cache: "cold" or "warm"; None for cold on a GPU.
        rounds: samples per kernel and call.
        calls_before: untimed calls of the same kernel before each sample.
        max_seconds: time limit per kernel and call, which may reduce the rounds.
        max_time: seconds after which the replay ends; the most representative calls run first.
        baseline: kernel that speed-ups are relative to; None for the kernel that the model called.
        errors_against: output that errors are relative to: "reference", "captured" or a kernel.
        metrics: figures measured only on request: "energy", "roofline", "resources".
        tolerances: constants for judging accuracy, or a TOML file of constants.
        save_output: directory for every kernel's outputs.
        gpus: "all", or indices of GPUs to spread the calls over.
        ray: address of a Ray cluster to spread the calls over.
        env: interpreters of other Python environments, by name.
        workers: False to run kernels in this process, where a crash ends it. Your own kernels are
            not ranked then.
        timeout: seconds after which a hanging kernel is killed.
        progress: False to hide progress and hints on stderr.
        for_model: measure as in a model, for `plan` and `verify`.

    Returns:
        Rows in the order of the calls; `best()` has the kernel to use for each call.

    Raises:
        Error: an argument cannot be used, or there is nothing to replay.

    Example:
        >>> rows = replay("captured_inputs", kernels="torch-*")
        >>> rows.best()
    """
    measure = MeasureChoice(
        cache=cache,
        rounds=rounds,
        calls_before=calls_before,
        max_seconds=max_seconds,
        baseline=baseline,
        errors_against=errors_against,
        metrics=tuple(metrics),
        save_output=save_output,
        tolerances=tolerances,
        for_model=for_model,
        backward=backward,
    )
    place = RunPlace(
        device=None if device is None else str(device),
        gpus=gpus if gpus is None or isinstance(gpus, str) else ",".join(map(str, gpus)),
        ray=ray,
        env=environments(env),
        timeout=timeout,
        in_process=not workers,
    )
    with call_choice(dataset, joined_names(calls), join_ranks, versus_random) as choice:
        names = joined_names(kernels)
        return measured(ReplayRequest(choice, names, measure, place, max_time), progress)


def measured(request: ReplayRequest, progress: bool | None = None) -> Rows:
    """Replay a request and return its rows.

    Raises:
        Error: a choice cannot be used, or there is nothing to replay.
    """
    from replay.api.measured_rows import Rows

    request.check()
    quiet = progress is False
    with Session(request, quiet=quiet) as session:
        for _ in session.rows():
            pass
        outcome = session.outcome()
    if outcome.left_out and not quiet:
        say(f"{outcome.why_left_out}: {outcome.left_out}")
    return Rows(outcome.rows)


@contextmanager
def call_choice(
    dataset: str | os.PathLike[str] | Iterable[AttentionCall],
    names: str | None = None,
    join_ranks: bool = False,
    versus_random: bool = False,
) -> Iterator[CallChoice]:
    """Yield the choice of a dataset's calls. Calls in memory are saved to disk during the block.

    Raises:
        ChoiceError: the argument is neither a dataset nor calls.
    """
    from capture.storage.dataset import Dataset

    if isinstance(dataset, Dataset):
        where = str(dataset.directory)
        yield RecordedCalls(where, names, join_ranks, versus_random, dataset)
    elif isinstance(dataset, str | os.PathLike):
        yield RecordedCalls(os.fspath(dataset), names, join_ranks, versus_random)
    else:
        calls = _calls(dataset)
        if names is not None or join_ranks or versus_random:
            raise ChoiceError(
                "calls, join_ranks and versus_random choose from a recording: name its directory"
            )
        with tempfile.TemporaryDirectory(prefix="attention-replay-") as directory:
            yield CallsInMemory(calls, Path(directory))


def environments(env: Mapping[str, str] | Sequence[str] | None) -> tuple[str, ...]:
    """Return the environments as `NAME=PYTHON` strings or paths of TOML files."""
    if env is None:
        return ()
    if isinstance(env, Mapping):
        return tuple(f"{name}={python}" for name, python in env.items())
    return (env,) if isinstance(env, str) else tuple(env)


def _calls(given: Any) -> tuple[AttentionCall, ...]:
    from capture.call.attention_call import AttentionCall

    calls = tuple(given) if isinstance(given, Iterable) else (given,)
    for call in calls:
        if not isinstance(call, AttentionCall):
            raise ChoiceError(
                f"expected a directory, a Dataset or attention calls, got {type(call).__name__}"
            )
    return calls
