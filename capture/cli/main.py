"""The `capture` command. Imports torch only after parsing the arguments."""

from __future__ import annotations

import argparse
import contextlib
import errno
import logging
import re
import shlex
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attention_replay.errors import Error
from capture.call.head_ranges import parse_ranges
from capture.call.splits import SPLITS
from capture.cli.combinations import misuse
from capture.cli.models_package import import_models
from capture.command_line.parser import OneSentenceParser, natural, not_empty, positive
from capture.command_line.repeated_options import Listed
from capture.command_line.standard_streams import (
    exit_with,
    give_up_stdout,
    is_of_stdout,
    make_usable,
)
from capture.command_line.verbosity import add_verbosity, narrated
from capture.large_imports import import_for_good, interruptible
from capture.recording.sampling import PHASES, SAMPLES, check_sample
from capture.text.counted import counted
from capture.text.printable import printable

if TYPE_CHECKING:
    from capture.recording.recording import Recording
    from capture.storage.dataset import Dataset

logger = logging.getLogger(__name__)

EXAMPLES = """examples:
  capture --model cogvideo --max 10                     record 10 attention calls of CogVideoX
  capture --model llama --steps 32 --prompt "Once"      decode 32 tokens after this prompt
  capture --model flux --size full --weights random     full size without a download: timing only
  capture --model ./my-checkpoint --max 20              a local diffusers or transformers checkpoint
  capture --model my_model.py:build                     your function: returns (module, run)
  capture --model llama --phase decode --heads 0-3      part of each call of one phase
  capture --model flux --sample hard --max 20           the calls most difficult in 8 bits
  capture --show captured_inputs                        list what was recorded
  capture --show captured_inputs --stats                what makes its values hard for a kernel
  capture --verify captured_inputs                      check the files and recompute the outputs

then: replay --dir captured_inputs --metric all
"""


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point; exits 0 on success, 1 if a check failed, 2 on invalid usage."""
    make_usable()
    parser = _parser()
    try:
        arguments = parser.parse_args(argv)
    except SystemExit as stopped:
        exit_with("capture", stopped.code)
    out = Path(arguments.out).absolute()  # a model may change the directory
    begun: list[Recording] = []
    try:
        with narrated(arguments.verbose):
            code = _dispatch(arguments, parser, begun)
    except KeyboardInterrupt:
        only_reads = arguments.show or arguments.verify or arguments.repair
        left = _left_by(begun, out) or ("" if only_reads else "; nothing was recorded")
        print(f"capture: interrupted{left}", file=sys.stderr)
        code = 130
    except SystemExit:  # of wrong usage
        raise
    except BaseException as error:  # a model may raise what is no Exception
        if arguments.debug:
            raise
        code = _explain(error, _left_by(begun, out))
    exit_with("capture", code)


def _left_by(begun: Sequence[Recording], out: Path) -> str:
    """Where the calls are that a recording kept before it ended early; empty if it kept none."""
    if any(recording.kept for recording in begun):
        return f"; calls already in {printable(str(out))} are readable"
    return ""


def _parser() -> argparse.ArgumentParser:
    parser = OneSentenceParser(
        prog="capture",
        description="Record the attention calls a model really makes (query, key, value,\n"
        "mask, output) in a directory of safetensors files.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_argument_group("what to run")
    what.add_argument(
        "--model",
        metavar="NAME|DIR|FILE.py:FUNCTION",
        help=f"{', '.join(import_models().NAMES)}; a checkpoint directory; or your own function",
    )
    what.add_argument(
        "--size",
        choices=["tiny", "full"],
        help="tiny: built in, no download (default without a GPU); full: the official size",
    )
    what.add_argument(
        "--weights",
        choices=["pretrained", "random"],
        help="random weights are suitable for timing, not for judging quantised kernels",
    )
    what.add_argument(
        "--checkpoint", metavar="ID_OR_DIR", help="weights other than the official ones"
    )
    what.add_argument(
        "--prompt",
        type=str,
        help="text to run the model on; may be empty, except for a language model",
    )
    what.add_argument("--steps", type=positive, help="denoising steps, or tokens to decode")
    what.add_argument("--seed", type=natural, default=0, help="for weights and noise (default 0)")
    parser.add_dtype(what)
    what.add_argument("--device", help="cuda, cpu … (default: cuda if available)")

    store = parser.add_argument_group("what to store")
    store.add_argument("--max", type=positive, default=10, help="calls to store (default 10)")
    store.add_argument(
        "--sample",
        type=_sample,
        default="spread",
        metavar="HOW",
        help="spread over layers, steps, phases and shapes (default); hard, those most difficult "
        "for a quantised kernel; the first calls; every:N, the first of every N; or reservoir, at "
        "random by --seed",
    )
    store.add_argument("--phase", choices=PHASES, help="store only calls of this phase")
    store.add_argument(
        "--heads",
        action=Listed,
        type=_heads,
        metavar="LIST",
        help="store only these query heads, e.g. 0,8-11, with their key/value heads",
    )
    store.add_argument(
        "--modules", action=Listed, metavar="A,B,'GLOB*'", help="paths of the modules to record"
    )
    store.add_argument("--max-bytes", type=_size, metavar="N", help="size limit, e.g. 500M, 20G")
    store.add_argument("--no-output", action="store_true", help="do not store attention outputs")
    store.add_argument(
        "--out", default="captured_inputs", metavar="DIR", help="default: captured_inputs"
    )
    store.add_argument(
        "--rank",
        type=natural,
        metavar="N",
        help="rank of this process: ranks share DIR (default: from the environment, as torchrun "
        "sets it)",
    )
    store.add_argument(
        "--split",
        choices=SPLITS,
        help="what ranks share out of each call, so that `replay --join-ranks` can put it together "
        "(default: heads, where distributed tensors say so)",
    )
    store.add_argument("--overwrite", action="store_true", help="replace this model's capture")

    store.add_argument(
        "--buffer-bytes",
        type=_size,
        metavar="N",
        help="host memory for calls that wait to be written (default: a quarter of what is free)",
    )
    store.add_argument(
        "--durable", action="store_true", help="have each call on the disk before the model goes on"
    )

    store.add_argument(
        "--audit",
        action="store_true",
        help="count attention operators that go past the recording (slower)",
    )

    inspect = parser.add_argument_group("inspect a recording")
    inspect.add_argument(
        "--show",
        metavar="DIR",
        help="list what DIR contains; DIR may also be a .zip or .tar.gz of one, or an address such "
        "as hf://datasets/ORG/NAME, s3://BUCKET/PATH or https://",
    )
    inspect.add_argument(
        "--stats",
        action="store_true",
        help="with --show: outlier channels of K and structure of the attention, layer by layer",
    )
    inspect.add_argument(
        "--verify", metavar="DIR", help="check files and recompute outputs; DIR as for --show"
    )
    inspect.add_argument("--repair", metavar="DIR", help="finish what a killed capture left in DIR")
    add_verbosity(parser)
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    parser.add_version()
    return parser


def _dispatch(
    arguments: argparse.Namespace, parser: argparse.ArgumentParser, begun: list[Recording]
) -> int:
    """Do what the arguments ask for; a recording is added to `begun` before its model runs."""
    if wrong := misuse(arguments):
        parser.error(wrong)
    if arguments.show:
        return _show(arguments.show, arguments.stats, quiet=arguments.quiet)
    if arguments.verify:
        return _verify(arguments.verify, quiet=arguments.quiet)
    if arguments.repair:
        return _repair(arguments.repair)
    # This imports PyTorch's compiler too, which is kept from compiling what is recorded.
    import_for_good("torch", "capture.recording.record")
    from capture.storage.target import no_empty_directory

    with no_empty_directory(Path(arguments.out).absolute()):
        return _capture(arguments, begun)


def _capture(arguments: argparse.Namespace, begun: list[Recording]) -> int:
    from rich.console import Console
    from rich.text import Text

    from capture.cli.show import human_bytes, share
    from capture.errors import CaptureError, RecordingWarning
    from capture.recording.parts import declared
    from capture.recording.record import record
    from capture.storage.target import CaptureTarget, current_rank, rank_name

    name = _capture_name(arguments.model)
    progress, notices = Console(stderr=True, quiet=arguments.quiet), Console(stderr=True)
    # A full-size model takes minutes to load, so fail early.
    rank = current_rank() if arguments.rank is None else arguments.rank
    declared(arguments.split, None, rank, arguments.heads)
    CaptureTarget.check(arguments.out, rank_name(name, rank), overwrite=arguments.overwrite)
    with progress.status(Text(f"loading {arguments.model} …")), interruptible():
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
        )
    logger.info("loaded %s", name)
    progress.print(Text(f"{name}: weights {runnable.weights}"))
    if runnable.note:
        progress.print(Text(f"{name}: {runnable.note}"))
    options = {each: getattr(arguments, each) for each in ("prompt", "steps", "dtype")}
    given = {each: value for each, value in options.items() if value is not None}
    with (
        _problems_at_once(RecordingWarning) as told,
        record(
            runnable.roots,
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
            settings={"model": arguments.model, "given": given, **runnable.settings},
            max_bytes=arguments.max_bytes,
            buffer_bytes=arguments.buffer_bytes,
            durable=arguments.durable,
            output=not arguments.no_output,
            overwrite=arguments.overwrite,
            audit=arguments.audit,
        ) as recording,
    ):
        begun.append(recording)
        _run_with_progress(runnable, recording, progress)
        logger.info("ran %s: %d calls seen, %d kept", name, recording.seen, recording.kept)
    logger.info("stored %s", human_bytes(recording.nbytes))
    untold = [problem for problem in recording.problems if problem not in told]
    if not recording.kept and not recording.lost:
        if untold:
            raise CaptureError("; ".join(untold))
        return 2
    if recording.without_heads:
        without = counted(recording.without_heads, "call")
        notices.print(f"{without} not stored: there is none of just these heads")
    if recording.refused_for_bytes:
        notices.print("reached --max-bytes: fewer calls are stored, less evenly spread")
    count = share(recording.kept, recording.seen, recording.nbytes)
    print(f"recorded {count} in {arguments.out}/")
    if recording.summary:
        progress.print(Text(recording.summary))
    if recording.audit:
        notices.print(Text(str(recording.audit)))
    for each in recording.missed_attention:
        print(f"note: not seen, and not in the census: {printable(str(each))}", file=sys.stderr)
    for problem in untold:
        print(f"capture: {_with_flags(problem)}", file=sys.stderr)
    if recording.kept and not arguments.quiet:
        command = shlex.join(["replay", "--dir", arguments.out])
        print(
            f"next: replay these calls through every kernel: {printable(command)}", file=sys.stderr
        )
    return 1 if recording.problems else 0


@contextlib.contextmanager
def _problems_at_once(category: type[Warning]) -> Iterator[list[str]]:
    """Print what a recording warns of when it does, with the names of options; what was printed."""
    told: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("always", category)
        show = warnings.showwarning

        def shown(message: Warning | str, kind: type[Warning], *where: Any) -> None:
            if not issubclass(kind, category):
                show(message, kind, *where)
                return
            told.append(str(message).removeprefix("recording: "))
            print(f"capture: {printable(_with_flags(told[-1]))}", file=sys.stderr, flush=True)

        warnings.showwarning = shown  # type: ignore[assignment]
        yield told


def _run_with_progress(runnable: Any, recording: Recording, console: Any) -> None:
    from rich.live import Live
    from rich.spinner import Spinner
    from rich.text import Text

    from capture.cli.show import human_bytes

    spinner = Spinner("dots")

    def status() -> Any:
        spinner.update(
            text=Text(
                f"running {runnable.name}: {counted(recording.seen, 'call')} seen, "
                f"{recording.kept} stored, {human_bytes(recording.nbytes)}"
            )
        )
        return spinner

    with Live(get_renderable=status, console=console, refresh_per_second=8, transient=True):
        runnable.run()


def _opened(where: str, *, quiet: bool, whole: bool) -> Dataset:
    """Open a dataset; of one that is elsewhere, copy all calls or just what lists them."""
    from capture.cli.arrivals import shown_arrivals
    from capture.storage.locations import directory_of

    directory_of(where)  # says at once that there is none
    import_for_good("torch")
    from capture.storage.dataset import Dataset

    with shown_arrivals(quiet=quiet) as report:
        dataset = Dataset.open(where, report=report)
        if whole:
            dataset.fetch(report=report)  # what cannot be had is told where it is read
    return dataset


def _show(where: str, stats: bool, *, quiet: bool) -> int:
    dataset = _opened(where, quiet=quiet, whole=stats)
    from rich.console import Console

    from capture.cli.show import show, show_statistics

    console = Console()
    show(dataset, console)
    if stats:
        show_statistics(dataset, console)
    return 0


def _repair(directory: str) -> int:
    import_for_good("torch")
    from capture.storage.repair import repair

    for sentence in repair(directory) or ["nothing to repair"]:
        print(printable(sentence))
    return 0


def _verify(where: str, *, quiet: bool) -> int:
    dataset = _opened(where, quiet=quiet, whole=True)
    from rich.console import Console

    from capture.cli.check import check_files
    from capture.cli.show import show_findings

    if dataset.note:
        print(f"note: {printable(dataset.note)}", file=sys.stderr)
    with Console(stderr=True, quiet=quiet).status("checking files and recomputing outputs …"):
        findings = check_files(dataset)
    show_findings(findings, Console())
    bad = sum(not finding.good for finding in findings)
    print(f"{len(findings) - bad:,} of {counted(len(findings), 'file')} passed")
    return 1 if bad or dataset.note else 0


def _capture_name(model: str) -> str:
    """Return a built-in name as is, and the last component of a directory or function path."""
    return Path(model).resolve().name if Path(model).is_dir() else Path(model).name


def _explain(error: BaseException, left: str) -> int:
    """Print one sentence, with the remedy if it is known; return the exit code.

    Args:
        left: what a recording left, as the end of the sentence.
    """
    from capture.errors import MissingPackage, described

    error = MissingPackage.behind(error)
    if isinstance(error, Error):
        print(f"capture: {printable(_with_flags(str(error)))}{left}", file=sys.stderr)
        return 2
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        named = printable(str(error.filename))
        print(f"capture: {named}: {error.strerror}, name another", file=sys.stderr)
        return 2
    if isinstance(error, OSError) and is_of_stdout(error):
        return give_up_stdout("capture", error)
    print(
        f"capture: failed with {printable(described(error))} (traceback with --debug){left}",
        file=sys.stderr,
    )
    return 1


def _with_flags(message: str) -> str:
    """Replace `record`'s keyword arguments by this command's flags: `max_bytes=` is --max-bytes."""
    return re.sub(r"`(\w+)=(?:True)?`", lambda found: "--" + found[1].replace("_", "-"), message)


def _sample(text: str) -> str:
    not_empty(text)
    try:
        check_sample(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be {SAMPLES}, not {text!r}") from error
    return text


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
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; use e.g. 500M or 20G")
    return value
