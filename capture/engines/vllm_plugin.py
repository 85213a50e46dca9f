"""Plugin that records inside a vLLM server, if the server's environment asks for it.

    ATTENTION_REPLAY_RECORD=DIR vllm serve MODEL -cc.cudagraph_mode=PIECEWISE

vLLM calls `register` in each of its processes. Without the variable, nothing happens. With it, each
worker's recording begins at the first request, when the profiling runs and CUDA graph captures are
over, and ends when `--max` calls are stored, at a problem, or at the server's end. Then every hook
is removed. No error of the recording reaches the server. Imports torch and vLLM late.

A server of several engines (data parallelism) records each under its own name: `.engine1` follows
the model's name for the second.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from attention_replay.errors import Error
from capture.command_line.parser import OneSentenceParser
from capture.command_line.record_options import add_storage_options, storage_arguments
from capture.errors import warned

if TYPE_CHECKING:
    from capture.recording.recording import Recording
    from capture.recording.termination import Job

DIRECTORY = "ATTENTION_REPLAY_RECORD"
"""Environment variable with the directory to write to."""

OPTIONS = "ATTENTION_REPLAY_OPTIONS"
"""Environment variable with options of `capture` that say what to store, as on a command line."""

_NOTHING = "the server goes on without a recording"

DEFAULTS = {"max": 100, "sample": "every:97"}
"""Defaults that differ from those of `capture`. A prime number meets every layer of a model."""

MOST_UNKEPT = 100_000
"""Number of calls after which a recording ends that could store none of them."""


def register() -> None:
    """Let each worker of this process record, if `ATTENTION_REPLAY_RECORD` is set."""
    if not os.environ.get(DIRECTORY):
        return
    with warned(_NOTHING):
        arguments = read_options(os.environ[DIRECTORY], os.environ.get(OPTIONS, ""))
        from vllm.v1.worker.worker_base import WorkerWrapperBase

        follow_steps(WorkerWrapperBase, arguments)


class _OptionsParser(OneSentenceParser):
    """Parser of the variable, whose errors become the server's warning."""

    def error(self, message: str) -> NoReturn:
        raise Error(f"{OPTIONS}: {message}")


def read_options(directory: str, options: str) -> argparse.Namespace:
    """Return the options of a server's recording.

    Raises:
        Error: the options are invalid, or would keep calls in memory until the end.
    """
    parser = _OptionsParser(add_help=False)
    add_storage_options(parser)
    parser.set_defaults(**DEFAULTS)
    try:
        given = shlex.split(options)
    except ValueError as error:
        raise Error(f"{OPTIONS}: {error} in {options!r}") from None
    arguments = parser.parse_args([*given, "--out", directory])
    if arguments.sample != "first" and not arguments.sample.startswith("every:"):
        raise Error(f"{OPTIONS}: a server needs --sample first or every:N, not {arguments.sample}")
    if not isinstance(arguments.max, int):
        raise Error(f"{OPTIONS}: a server needs --max N, not {arguments.max}")
    return arguments


def follow_steps(workers: type, arguments: argparse.Namespace) -> WorkerRecording:
    """Record the steps of workers of a class, and restore the class at the end."""
    original = workers.execute_model  # type: ignore[attr-defined]
    recording = WorkerRecording(arguments)

    @functools.wraps(original)
    def execute_model(worker: Any, *args: Any, **kwargs: Any) -> Any:
        goes_on = False
        with warned(_NOTHING):
            goes_on = recording.goes_on(worker)
        if not goes_on:
            workers.execute_model = original  # type: ignore[attr-defined]
            with warned(_NOTHING):
                recording.end()
        return original(worker, *args, **kwargs)

    workers.execute_model = execute_model  # type: ignore[attr-defined]
    return recording


class WorkerRecording:
    """Recording of one worker of a server, from its first step on."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._hooks = contextlib.ExitStack()
        self._recording: Recording | None = None
        """The recording; None before the first step."""
        self._writing: Job | None = None
        """Thread that writes the last calls; None while calls are recorded."""
        self._problems = 0
        """Number of problems that the recording had at its start."""

    def goes_on(self, worker: Any) -> bool:
        """Begin or continue the recording before a step; return False once all is written.

        The last calls are written while the server goes on. `end` must then be called between two
        steps, since a step that has met a hook needs it.
        """
        if self._recording is None:
            self._recording = self._begin(worker)
        elif self._writing is None and self._is_done(self._recording):
            from capture.recording.termination import started

            self._writing = started(self._write)
        return self._writing is None or self._writing.is_alive()

    def end(self) -> None:
        """Write all calls if that is not done yet, and remove all hooks."""
        self._write()
        self._hooks.close()

    def _begin(self, worker: Any) -> Recording:
        from multiprocessing.util import Finalize

        from capture.recording.record import record

        model = worker.vllm_config.model_config.model
        # Unlike the data-parallel rank, the index also differs between engines of dense models.
        engine = worker.vllm_config.parallel_config.data_parallel_index
        options = storage_arguments(self._arguments)
        ranks = _tensor_parallel_ranks()
        if len(ranks) > 1 and options["heads"] is None:
            options |= {"split": options["split"] or "heads", "split_ranks": ranks}
        recording = self._hooks.enter_context(
            record(
                worker.get_model(),
                name=f"{Path(model).name}.engine{engine}" if engine else Path(model).name,
                weights=model,
                settings={"engine": "vllm"},
                **options,
            )
        )
        self._problems = len(recording.problems)
        # Unlike atexit, this also runs at the end of a process that `multiprocessing` forked.
        Finalize(None, self.end, exitpriority=100)
        return recording

    def _write(self) -> None:
        """Write the calls in memory. Later calls are not recorded."""
        if self._recording is not None:
            self._recording.close(complete=True)

    def _is_done(self, recording: Recording) -> bool:
        return (
            recording.kept >= self._arguments.max
            or (not recording.kept and recording.seen > MOST_UNKEPT)
            or recording.counts.refused_for_bytes > 0
            or len(recording.problems) > self._problems
        )


def _tensor_parallel_ranks() -> list[int]:
    """Return the ranks that divide this worker's heads among themselves."""
    from vllm.distributed import get_tp_group

    return list(get_tp_group().ranks)
