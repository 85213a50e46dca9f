"""`capture --model MODEL`: run a model and record its attention calls. Imports torch late."""

from __future__ import annotations

import argparse
import contextlib
import logging
import shlex
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attention_replay.errors import Error
from capture.cli.verbs import add_common_options, new_parser, with_flags
from capture.command_line.parser import OneSentenceParser
from capture.command_line.record_options import (
    add_engine_options,
    add_storage_options,
    check_engine_options,
    storage_arguments,
)
from capture.command_line.run_options import add_run_options, load_run, model_is_required
from capture.large_imports import import_large
from capture.recording.sampling import make_sampler
from capture.text.counted import human_bytes, share
from capture.text.printable import printable

if TYPE_CHECKING:
    from capture.recording.recording import Recording

logger = logging.getLogger(__name__)

USAGE = """capture --model MODEL [options]
       capture show DIR | check DIR | repair DIR | share DIR"""

DESCRIPTION = """\
Run a model and record its attention calls (query, key, value, mask, output) in a directory of
safetensors files. Other verbs have a --help of their own: show lists a recording, check verifies
its files, repair recovers it after a kill, share copies it for others."""

EXAMPLES = """\
  capture --model cogvideo --max 10                    10 calls of CogVideoX
  capture --model DIR --set height=256 --set width=256 your checkpoint, at this size
  capture --model my_model.py:build                    your function, which returns (module, run)
  capture --engine vllm --model DIR --prompts FILE     your checkpoint inside vLLM
  capture check captured_inputs                        verify the files and recompute the outputs
then: replay --dir captured_inputs --metric all"""


def parser() -> OneSentenceParser:
    """Return the parser of `capture --model MODEL`."""
    command = new_parser("", DESCRIPTION, examples=EXAMPLES, usage=USAGE)
    add_run_options(command)
    add_engine_options(command)
    add_storage_options(command)
    add_common_options(command)
    return command


def run(arguments: argparse.Namespace) -> int:
    """Run the model and record its calls; return the exit code.

    After an early end, `arguments.left_behind` describes the calls left in the directory.
    """
    if not arguments.model:
        raise Error(model_is_required())
    check_engine_options(arguments)
    try:
        make_sampler(arguments.sample, arguments.max, arguments.max_bytes)
    except ValueError as error:
        raise Error(f"{error}") from error
    out = Path(arguments.out).absolute()  # a model may change the working directory
    begun: list[Recording] = []
    try:
        # This also imports PyTorch's compiler, which can then be turned off for recorded code.
        import_large("torch", "capture.recording.record")
        from capture.storage.target import no_empty_directory

        with no_empty_directory(out):
            return _record(arguments, begun)
    except BaseException as error:
        if any(recording.kept for recording in begun):
            arguments.left_behind = f"; calls already in {printable(str(out))} are readable"
        elif isinstance(error, KeyboardInterrupt):
            arguments.left_behind = "; nothing was recorded"
        raise


def _record(arguments: argparse.Namespace, begun: list[Recording]) -> int:
    """Load the model, record its run and report; add the recording to `begun` at its start."""
    from rich.console import Console
    from rich.text import Text

    from capture.cli.announcement import DiskEstimate, announcement
    from capture.errors import RecordingWarning
    from capture.recording.parts import declared
    from capture.recording.record import record
    from capture.recording.run_progress import shown_progress
    from capture.storage.target import CaptureTarget, current_rank, rank_name

    name = _capture_name(arguments.model)
    progress = Console(stderr=True, quiet=arguments.quiet)
    # Loading a full-size model takes minutes, so the options are checked first.
    rank = current_rank() if arguments.rank is None else arguments.rank
    declared(arguments.split, None, rank, arguments.heads)
    CaptureTarget.check(arguments.out, rank_name(name, rank), overwrite=arguments.overwrite)
    with progress.status(Text(f"loading {arguments.model} …")):
        runnable = _load(arguments)
    logger.info("loaded %s", name)
    progress.print(Text(announcement(name, runnable)))
    with (
        _problems_at_once(RecordingWarning) as printed,
        record(
            runnable.roots if runnable.pipeline is None else runnable.pipeline,
            name=name,
            weights=runnable.weights,
            seed=arguments.seed,
            settings=runnable.settings,
            **storage_arguments(arguments) | {"rank": rank},
        ) as recording,
    ):
        begun.append(recording)
        limits = arguments.max, arguments.max_bytes
        recording.watch(DiskEstimate(recording, *limits, Path(arguments.out).absolute(), progress))
        with shown_progress(runnable, recording, arguments.max, progress):
            runnable.run()
        logger.info("ran %s: %d calls seen, %d kept", name, recording.seen, recording.kept)
    logger.info("stored %s", human_bytes(recording.counts.nbytes))
    return _report(recording, printed, arguments, progress)


def _load(arguments: argparse.Namespace) -> Any:
    """Load the model and its run: `models.Runnable`, or `capture.engines.vllm.EngineRun`."""
    if arguments.engine is None:
        return load_run(arguments)
    from capture.engines.vllm import load

    return load(
        arguments.model,
        prompts=arguments.prompts,
        trace=arguments.trace,
        seed=arguments.seed,
        dtype=arguments.dtype,
        options=dict(arguments.set),
    )


def _report(
    recording: Recording, printed: Sequence[str], arguments: argparse.Namespace, progress: Any
) -> int:
    """Print a summary of recorded and missing calls, and return the exit code.

    Args:
        printed: problems that have been printed before.
    """
    from rich.console import Console
    from rich.text import Text

    from capture.errors import CaptureError

    counts = recording.counts
    problems = [problem for problem in recording.problems if problem not in printed]
    if not recording.kept and not recording.lost:
        if problems:
            raise CaptureError("; ".join(problems))
        return 2
    notices = Console(stderr=True)
    if counts.refused_for_bytes:
        notices.print(
            "reached --max-bytes: fewer calls are stored, and they are spread less evenly"
        )
    size = share(recording.kept, recording.seen, counts.nbytes)
    print(f"recorded {size} in {arguments.out}/")
    if recording.summary not in printed:
        progress.print(Text(printable(recording.summary)))
    if recording.capture.most_gain:
        progress.print(Text(recording.capture.most_gain))
    for problem in problems:
        print(f"capture: {with_flags(problem)}", file=sys.stderr)
    if recording.kept and not arguments.quiet:
        further = ["--backward"] if vars(arguments).get("backward") else []
        command = printable(shlex.join(["replay", "--dir", arguments.out, *further]))
        print(f"next: replay these calls through the default kernels: {command}", file=sys.stderr)
    return 1 if recording.problems else 0


@contextlib.contextmanager
def _problems_at_once(category: type[Warning]) -> Iterator[list[str]]:
    """Print a recording's warnings as they occur, with option names; yield a list of them."""
    printed: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("always", category)
        show = warnings.showwarning

        def shown(message: Warning | str, kind: type[Warning], *where: Any) -> None:
            if not issubclass(kind, category):
                show(message, kind, *where)
                return
            printed.append(str(message).removeprefix("recording: "))
            print(f"capture: {printable(with_flags(printed[-1]))}", file=sys.stderr, flush=True)

        warnings.showwarning = shown  # type: ignore[assignment]
        yield printed


def _capture_name(model: str) -> str:
    """Return a built-in name unchanged, or the last component of a directory or function path."""
    return Path(model).resolve().name if Path(model).is_dir() else Path(model).name
