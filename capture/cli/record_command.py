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
from capture.call.head_ranges import parse_ranges
from capture.call.splits import SPLITS
from capture.cli.verbs import add_common_options, new_parser, with_flags
from capture.command_line.parser import Listed, OneSentenceParser, natural, not_empty, positive
from capture.large_imports import import_large
from capture.models_package import import_models
from capture.recording.sampling import PER_LAYER, PHASES, SAMPLES, make_sampler
from capture.text.counted import counted, human_bytes, share
from capture.text.printable import printable

if TYPE_CHECKING:
    from capture.recording.recording import Recording

logger = logging.getLogger(__name__)

USAGE = """capture --model MODEL [options]
       capture show DIR | check DIR | repair DIR"""

DESCRIPTION = """\
Run a model and record its attention calls (query, key, value, mask, output) in a directory of
safetensors files. Other verbs, each with its own --help: show lists a recording, check verifies
its files, repair recovers a recording whose process was killed."""

EXAMPLES = """\
  capture --model cogvideo --max 10                    10 calls of CogVideoX
  capture --model DIR --set height=256 --set width=256 your checkpoint, at this size
  capture --model my_model.py:build                    your function, which returns (module, run)
  capture show captured_inputs --stats                 list the calls and their statistics
  capture check captured_inputs                        verify the files and recompute the outputs
then: replay --dir captured_inputs --metric all"""


def parser() -> OneSentenceParser:
    """Return the parser of `capture --model MODEL`."""
    command = new_parser("", DESCRIPTION, examples=EXAMPLES, usage=USAGE)
    _add_run_options(command)
    _add_storage_options(command)
    add_common_options(command)
    return command


def _add_run_options(command: OneSentenceParser) -> None:
    run = command.add_argument_group("what to run")
    run.add_argument(
        "--model",
        metavar="MODEL",
        help=f"{', '.join(import_models().NAMES)}; a checkpoint directory; or your own function, "
        "FILE.py:FUNCTION",
    )
    run.add_argument(
        "--size",
        choices=["tiny", "full"],
        help="tiny: small, no download (default without a GPU); full: the official size",
    )
    run.add_argument(
        "--weights",
        choices=["pretrained", "random"],
        help="random weights are fine for timing, but not for judging quantised kernels "
        "(default: pretrained)",
    )
    run.add_argument(
        "--checkpoint", metavar="ID_OR_DIR", help="checkpoint to load instead of the official one"
    )
    run.add_argument(
        "--prompt",
        type=str,
        help="text to run the model on (may be empty for images and video)",
    )
    run.add_argument(
        "--steps",
        type=positive,
        metavar="N",
        help="number of denoising steps, or of tokens to decode",
    )
    run.add_argument(
        "--seed",
        type=natural,
        default=0,
        metavar="N",
        help="seed of weights and noise (default: 0)",
    )
    run.add_argument(
        "--set",
        action="append",
        type=_argument,
        default=[],
        metavar="NAME=VALUE",
        help="another argument of the pipeline or of generate; repeatable",
    )
    command.add_dtype(run)
    run.add_argument("--device", help="device such as cuda or cpu (default: cuda if available)")


def _add_storage_options(command: OneSentenceParser) -> None:
    store = command.add_argument_group("what to store")
    store.add_argument(
        "--max",
        type=lambda text: text if text == PER_LAYER else positive(text),
        default=10,
        metavar="N",
        help="calls to store (default: 10); per-layer: one of each layer and phase",
    )
    store.add_argument(
        "--sample",
        type=_sample,
        default="spread",
        metavar="HOW",
        help="calls to store: spread over layers, steps, phases and shapes (default); hard: most "
        "difficult for 8-bit kernels; first; or every:N: first of every N calls",
    )
    store.add_argument("--phase", choices=PHASES, help="store only calls of this phase")
    store.add_argument(
        "--heads",
        action=Listed,
        type=_heads,
        metavar="LIST",
        help="query heads to store, such as 0,8-11, with their key/value heads (default: all)",
    )
    store.add_argument(
        "--modules",
        action=Listed,
        metavar="LIST",
        help="store only calls of these modules (paths or globs)",
    )
    store.add_argument(
        "--max-bytes",
        type=_size,
        metavar="SIZE",
        help="limit of the total size, such as 500M or 20G",
    )
    store.add_argument("--no-output", action="store_true", help="do not store attention outputs")
    store.add_argument(
        "--out",
        default="captured_inputs",
        metavar="DIR",
        help="directory to write to (default: captured_inputs)",
    )
    store.add_argument(
        "--overwrite", action="store_true", help="replace an earlier recording of this model"
    )
    store.add_argument(
        "--rank",
        type=natural,
        metavar="N",
        help="rank of this process; all ranks may write to one DIR (default: as set by torchrun)",
    )
    store.add_argument(
        "--split",
        choices=SPLITS,
        help="how ranks split a call, for `replay --join-ranks` (default: by heads if distributed "
        "tensors are split by heads)",
    )
    store.add_argument(
        "--buffer-bytes",
        type=_size,
        metavar="SIZE",
        help="host memory for calls that are not written yet (default: a quarter of free memory)",
    )
    store.add_argument(
        "--durable", action="store_true", help="write each call to disk before the model continues"
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the model and record its calls; return the exit code.

    After an early end, `arguments.left_behind` describes the calls left in the directory.
    """
    if not arguments.model:
        raise Error("--model is required: cogvideo, flux, llama, a directory or file.py:function")
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

    from capture.errors import RecordingWarning
    from capture.recording.parts import declared
    from capture.recording.record import record
    from capture.storage.target import CaptureTarget, current_rank, rank_name

    name = _capture_name(arguments.model)
    progress = Console(stderr=True, quiet=arguments.quiet)
    # Loading a full-size model takes minutes, so the options are checked first.
    rank = current_rank() if arguments.rank is None else arguments.rank
    declared(arguments.split, None, rank, arguments.heads)
    CaptureTarget.check(arguments.out, rank_name(name, rank), overwrite=arguments.overwrite)
    with progress.status(Text(f"loading {arguments.model} …")):
        runnable = import_models().load(
            arguments.model,
            size=arguments.size,
            weights=arguments.weights,
            checkpoint=arguments.checkpoint,
            prompt=arguments.prompt,
            steps=arguments.steps,
            seed=arguments.seed,
            dtype=arguments.dtype,
            device=arguments.device,
            arguments=dict(arguments.set),
        )
    logger.info("loaded %s", name)
    progress.print(Text(f"{name}: weights {runnable.weights}"))
    with (
        _problems_at_once(RecordingWarning) as printed,
        record(
            runnable.roots if runnable.pipeline is None else runnable.pipeline,
            out=arguments.out,
            max=arguments.max,
            name=name,
            sample=arguments.sample,
            phase=arguments.phase,
            heads=arguments.heads,
            modules=arguments.modules,
            weights=runnable.weights,
            seed=arguments.seed,
            rank=rank,
            split=arguments.split,
            settings=runnable.settings,
            max_bytes=arguments.max_bytes,
            buffer_bytes=arguments.buffer_bytes,
            durable=arguments.durable,
            output=not arguments.no_output,
            overwrite=arguments.overwrite,
        ) as recording,
    ):
        begun.append(recording)
        _run_with_progress(runnable, recording, progress)
        logger.info("ran %s: %d calls seen, %d kept", name, recording.seen, recording.kept)
    logger.info("stored %s", human_bytes(recording.counts.nbytes))
    return _report(recording, printed, arguments, progress)


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
    for problem in problems:
        print(f"capture: {with_flags(problem)}", file=sys.stderr)
    if recording.kept and not arguments.quiet:
        command = printable(shlex.join(["replay", "--dir", arguments.out]))
        print(f"next: replay these calls through every kernel: {command}", file=sys.stderr)
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


def _run_with_progress(runnable: Any, recording: Recording, console: Any) -> None:
    from rich.live import Live
    from rich.spinner import Spinner
    from rich.text import Text

    spinner = Spinner("dots")

    def status() -> Any:
        stored = f"{recording.kept} stored, {human_bytes(recording.counts.nbytes)}"
        seen = counted(recording.seen, "call")
        spinner.update(text=Text(f"running {runnable.name}: {seen} seen, {stored}"))
        return spinner

    with Live(get_renderable=status, console=console, refresh_per_second=8, transient=True):
        runnable.run()


def _capture_name(model: str) -> str:
    """Return a built-in name unchanged, or the last component of a directory or function path."""
    return Path(model).resolve().name if Path(model).is_dir() else Path(model).name


def _sample(text: str) -> str:
    not_empty(text)
    try:
        make_sampler(text, 1, None)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be {SAMPLES}, not {text!r}") from error
    return text


def _argument(text: str) -> tuple[str, str]:
    not_empty(text)
    name, equals, value = text.partition("=")
    if not (equals and name.isidentifier()):
        raise argparse.ArgumentTypeError(f"must be NAME=VALUE, not {text!r}")
    return name, value


def _heads(text: str) -> tuple[int, ...]:
    not_empty(text)
    try:
        return parse_ranges(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _size(text: str) -> int:
    not_empty(text)
    units = {"K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
    number, unit = text.upper().removesuffix("B"), 1
    if number[-1:] in units:
        number, unit = number[:-1], units[number[-1]]
    try:
        value = int(float(number) * unit)
    except (ValueError, OverflowError):
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"invalid size {text!r} (must be such as 500M or 20G)")
    return value
