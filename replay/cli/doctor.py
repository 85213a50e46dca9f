"""`replay doctor`: finds out why and where a kernel is wrong, and which kernel to use instead."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import warnings
from pathlib import Path

from capture.command_line.parser import Listed, positive
from capture.text.printable import printable
from replay.api.call_choices import RecordedCalls
from replay.api.choices import thresholds
from replay.api.chosen_device import check_name, device_of
from replay.api.diagnose import ExaminationInterrupted, able_kernels, doctor
from replay.api.messages import say
from replay.cli.files import UsageError, check_files, write_and_print
from replay.cli.shared_options import WAITING, VerbParser
from replay.cli.stdout import reserved_stdout
from replay.diagnosis.modes import chosen_modes

CALLS = 20
"""Default number of calls to record from a model."""

EXAMPLES = """\
  replay doctor --dir captured_inputs                         the kernels of a plain replay
  replay doctor --dir captured_inputs --kernels mine.py:attention --call 'flux-*'
  replay doctor --dir captured_inputs --kernels all --json findings.json
  replay doctor --dir captured_inputs --kernels captured      what the model itself computed
  replay doctor --dir captured_inputs --in graph,compile      in a CUDA graph and compiled, too
  replay doctor --model flux --kernels sage2                  record first
"""


def parser() -> VerbParser:
    """Build the parser of `replay doctor`."""
    command = VerbParser(
        "doctor",
        "Find out why kernels are wrong on recorded calls: on which layer, step and head,\n"
        "what causes it and how that was found, and what to use instead. Exits with 1 if\n"
        "a kernel is wrong, and with 3 if one could not be tried in a mode of --in.",
        EXAMPLES,
    )
    source = command.add_mutually_exclusive_group(required=True)
    command.add("--dir", to=source, required=False)
    source.add_argument(
        "--model",
        metavar="MODEL",
        help="record its hardest calls first, as `capture --model MODEL --sample hard` does",
    )
    command.add_argument(
        "--max",
        type=positive,
        metavar="N",
        help=f"number of calls to record with --model (default {CALLS})",
    )
    command.add("--call", "--kernels", "--device", WAITING, "--tolerances")
    command.add_argument(
        "--in",
        action=Listed,
        dest="inside",
        metavar="A,B",
        help="modes to try besides eager: graph (a CUDA graph), compile (default: none)",
    )
    command.add("--json", help="write the list of findings as JSON (- for stdout)")
    command.add_common()
    return command


def run(arguments: argparse.Namespace) -> int:
    """Examine kernels, and print and write the findings.

    Returns:
        1 if a kernel is wrong, 3 if a kernel could not be examined in a mode, 0 otherwise.

    Raises:
        Error: an argument cannot be used.
    """
    check_files(arguments)
    if arguments.max is not None and arguments.model is None:
        raise UsageError("--max limits what is recorded: give --model MODEL")
    check_name(arguments.device)
    if arguments.inside is not None:
        names_graph = "graph" in arguments.inside  # looking for a GPU imports torch
        has_gpu = not names_graph or device_of(arguments.device).type == "cuda"
        chosen_modes(arguments.inside, has_gpu=has_gpu, in_process=arguments.in_process)
    arguments.tolerances = thresholds(arguments.tolerances)
    return _examine(arguments) if arguments.model is None else _record_and_examine(arguments)


def _record_and_examine(arguments: argparse.Namespace) -> int:
    device = device_of(arguments.device)
    # Report a kernel that cannot run now, before the model's long run.
    able_kernels(arguments.kernels, device, arguments.timeout, workers=not arguments.in_process)
    with tempfile.TemporaryDirectory() as directory:
        arguments.dir = str(Path(directory) / "captured_inputs")
        # Omit the default device, because a user's function may have no device parameter.
        _record(arguments, None if device == device_of(None) else str(device))
        return _examine(arguments)


def _record(arguments: argparse.Namespace, device: str | None) -> None:
    """Record the model's hardest calls into `arguments.dir`."""
    from capture.errors import RecordingWarning
    from capture.models_package import import_models
    from capture.recording.record import record
    from capture.text.counted import share

    runnable = import_models().load(arguments.model, device=device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RecordingWarning)  # the problems are printed below
        with record(
            runnable.roots,
            arguments.dir,
            max=arguments.max or CALLS,
            name=Path(arguments.model).name,
            sample="hard",
            weights=runnable.weights,
            settings=runnable.settings,
        ) as recording:
            runnable.run()
    if not recording.kept:
        raise UsageError("; ".join(recording.problems))
    for problem in recording.problems:
        print(f"note: {printable(problem)}", file=sys.stderr)
    size = share(recording.kept, recording.seen, recording.counts.nbytes)
    print(f"recorded {size}", file=sys.stderr)


def _examine(arguments: argparse.Namespace) -> int:
    RecordedCalls(arguments.dir, arguments.call).check()
    try:
        with reserved_stdout():
            found = doctor(
                arguments.dir,
                arguments.kernels,
                calls=arguments.call,
                device=arguments.device,
                workers=not arguments.in_process,
                timeout=arguments.timeout,
                inside=arguments.inside,
                tolerances=arguments.tolerances,
                progress=not arguments.quiet,
            )
    except ExaminationInterrupted as interrupted:
        raise KeyboardInterrupt(_interruption(interrupted, arguments.json)) from None
    write_and_print(arguments.json, [one.to_json() for one in found.found], found)
    for sentence in found.left_out:
        say(sentence)
    if found.wrong or found.unreadable:
        return 1
    return 3 if found.untried else 0


def _interruption(interrupted: ExaminationInterrupted, file: str | None) -> str:
    """Print the findings so far, and return a sentence on how many runs were examined."""
    found = interrupted.found
    if not found.examined:
        return "nothing was examined"
    print(found, file=sys.stderr if file == "-" else sys.stdout)
    kept = f", and {file} stayed as before" if file is not None and os.path.isfile(file) else ""
    return f"{found.examined} of {interrupted.total} runs of a kernel on a call were examined{kept}"
