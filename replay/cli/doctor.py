"""`replay doctor`: why a kernel is wrong on recorded calls, where, and what to use instead."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from capture.command_line.parser import OneSentenceParser, positive, positive_number
from capture.command_line.repeated_options import Listed
from capture.command_line.verbosity import add_verbosity, narrated
from capture.text.printable import printable
from replay.api.choices import thresholds
from replay.api.chosen_device import device_of
from replay.cli.files import UsageError, check_place, opened, output_file, shared_file
from replay.cli.stdout import reserved_stdout

if TYPE_CHECKING:
    import torch

    from replay.bench.settings import Settings
    from replay.diagnosis.examinations import Diagnoses
    from replay.kernels.registry import Kernel
    from replay.workers.environments import ProbeResult
    from replay.workers.execution import Progress
    from replay.workloads.workload import Workload

CALLS = 20
"""Number of calls to record of a model."""

EXAMPLES = """examples:
  replay doctor --dir captured_inputs                         the kernels of a plain replay
  replay doctor --dir captured_inputs --kernels sage2
  replay doctor --dir captured_inputs --kernels mine.py:attention --call 'flux-*'
  replay doctor --dir captured_inputs --kernels all --json findings.json
  replay doctor --dir captured_inputs --kernels captured      what the model itself computed
  replay doctor --model flux --kernels sage2                  record first
"""


def parser() -> OneSentenceParser:
    """Build the parser of `replay doctor`."""
    command = OneSentenceParser(
        prog="replay doctor",
        description="Find out why kernels are wrong on recorded calls: on which layer, step and\n"
        "head, what causes it and how that was found, and what to use instead. Exits\n"
        "with 1 if a kernel is wrong.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    source = command.add_mutually_exclusive_group(required=True)
    source.add_argument("--dir", metavar="DIR", help="what `capture` wrote, as for replay --dir")
    source.add_argument(
        "--model",
        metavar="MODEL",
        help="record its hardest calls first, as `capture --model MODEL --sample hard` does",
    )
    command.add_argument(
        "--max",
        type=positive,
        metavar="N",
        help=f"with --model: number of calls to record (default {CALLS})",
    )
    command.add_argument(
        "--kernels",
        action=Listed,
        metavar="A,B,'GLOB*'",
        help="default: a few; all for every one; captured for the recorded outputs",
    )
    command.add_argument(
        "--call", action=Listed, metavar="A,B,'GLOB*'", help="only the calls of these names"
    )
    command.add_argument("--device", help="cuda, cpu … (default: cuda if available)")
    command.add_argument(
        "--timeout",
        type=positive_number,
        default=300.0,
        metavar="S",
        help="kill a kernel that hangs for this long (default 300)",
    )
    command.add_argument(
        "--in-process",
        action="store_true",
        help="use no worker processes: a crash ends the run; protects against accidents only",
    )
    command.add_argument("--tolerances", metavar="TOML", help="judge accuracy by other constants")
    command.add_argument(
        "--json",
        type=output_file,
        metavar="FILE",
        help="write the list of findings, one per kernel and call (- for stdout)",
    )
    add_verbosity(command)
    command.add_argument("--debug", action="store_true", help="show tracebacks")
    return command


def run(argv: Sequence[str]) -> int:
    """Examine, print and write; 1 if anything is wrong.

    Raises:
        Error: an argument cannot be used.
    """
    arguments = parser().parse_args(argv)
    if wrong := shared_file(arguments, ("dir", "tolerances"), ("json",)):
        raise UsageError(wrong)
    if arguments.max is not None and arguments.model is None:
        raise UsageError("--max limits what is recorded: give --model MODEL")
    if arguments.in_process and "timeout" in arguments.given:
        raise UsageError(
            "--in-process has no worker that --timeout could end: leave out one of them"
        )
    check_place(arguments.json)
    return narrated(arguments.verbose)(partial(_examine, arguments))()


def _examine(arguments: argparse.Namespace) -> int:
    if arguments.model is None:
        return _examine_directory(arguments)
    from capture.cli.main import main as capture
    from capture.storage.dataset import Dataset
    from capture.text.counted import share

    device = device_of(arguments.device)
    kernels = _kernels(arguments, device)  # what cannot run is said before a long run
    with tempfile.TemporaryDirectory() as directory:
        arguments.dir = str(Path(directory) / "captured_inputs")
        asked = ["--model", arguments.model, "--out", arguments.dir, "--sample", "hard", "--quiet"]
        if device != device_of(None):  # where even a function that takes no device builds a model
            asked += ["--device", str(device)]
        if arguments.debug:
            asked.append("--debug")
        try:
            # It would name the directory, which is gone before anybody can look into it.
            with contextlib.redirect_stdout(io.StringIO()):
                capture([*asked, "--max", str(arguments.max or CALLS)])
        except SystemExit as end:
            if end.code:  # it has said why
                return int(end.code)
        recorded = Dataset.open(arguments.dir)
        seen = sum(each.calls_seen for each in recorded.captures)
        print(f"recorded {share(len(recorded), seen, recorded.nbytes)}", file=sys.stderr)
        return _examine_directory(arguments, kernels)


def _examine_directory(
    arguments: argparse.Namespace, kernels: Sequence[Kernel] | None = None
) -> int:
    """Examine kernels that can run here; without any, those that the arguments name."""
    from capture.storage.arrivals import shown_arrivals
    from replay.diagnosis.examinations import Diagnoses, diagnose
    from replay.distribution.pace import Pace
    from replay.report.progress import shown_progress
    from replay.rows.row_files import plain
    from replay.workloads.recorded import from_directory

    device = device_of(arguments.device)
    with shown_arrivals(quiet=arguments.quiet) as report_arrivals:
        workloads, note = from_directory(arguments.dir, arguments.call, report=report_arrivals)
    settings = _settings(arguments, device)
    found, tasks = Diagnoses(), []
    try:
        with reserved_stdout():
            if kernels is None:
                kernels = _kernels(arguments, device)
            tasks = [f"{each.name}, {kernel.name}" for each in workloads for kernel in kernels]
            with shown_progress(Pace(dict.fromkeys(tasks, 1.0)), quiet=arguments.quiet) as report:
                diagnose(
                    workloads,
                    kernels,
                    settings,
                    arguments.timeout,
                    _one_by_one(report, tasks),
                    in_process=arguments.in_process,
                    found=found,
                )
    except KeyboardInterrupt:
        raise KeyboardInterrupt(_interruption(found, len(tasks), arguments.json)) from None
    try:
        with opened(arguments.json) as file:
            if file is not None:
                json.dump(plain([each.to_json() for each in found.found]), file, indent=1)
                file.write("\n")
    finally:  # also where there is no room for the file
        print(found, file=sys.stderr if arguments.json == "-" else sys.stdout)
    _say_what_was_left_out(found, note)
    return 1 if found.found or found.unreadable else 0


def _interruption(found: Diagnoses, tasks: int, file: str | None) -> str:
    """What an interrupted examination does not have, once what it has is printed."""
    if not found.examined:
        return "nothing was examined"
    print(found, file=sys.stderr if file == "-" else sys.stdout)
    kept = f", and {file} stayed as before" if file is not None and os.path.isfile(file) else ""
    return f"{found.examined} of {tasks} runs of a kernel on a call were examined{kept}"


def _one_by_one(report: Progress, tasks: Sequence[str]) -> Progress:
    """Progress of kernels on calls, of which each ends where the next begins."""
    from replay.bench.runner import DONE

    at_work: list[Workload] = []

    def reached(workload: Workload, kernel: str) -> None:
        for each in at_work:
            report(each, DONE)
        task = replace(workload, name=f"{workload.name}, {kernel}")
        at_work[:] = [task] if task.name in tasks else []
        report(task, "examining")

    return reached


def _kernels(arguments: argparse.Namespace, device: torch.device) -> list[Kernel]:
    """The kernels that can run here.

    Raises:
        UsageError: one that was named cannot, or none can.
    """
    from replay.diagnosis import captured
    from replay.kernels.registry import find, select

    patterns = arguments.kernels
    parts = [] if patterns is None else [part.strip() for part in patterns.split(",")]
    own = [captured.CAPTURED] if captured.NAME in parts else []
    if own and set(parts) == {captured.NAME}:
        return own
    if own:
        patterns = ",".join(part for part in parts if part != captured.NAME)
    kernels, names = select(patterns)
    # The failure of a user's own kernel is a finding.
    ours = [kernel for kernel in map(find, [each.name for each in kernels]) if not kernel.load]
    probed = _probed(ours, device, arguments) if ours else {}
    absent = {name: found.reason for name, found in probed.items() if found.reason is not None}
    for name in names:
        if name in absent:
            raise UsageError(f"{name} cannot run on {device}: {absent[name]}")
    able = [kernel for kernel in kernels if kernel.name not in absent]
    if not able:
        raise UsageError(f"no kernel of --kernels {arguments.kernels} can run on {device}")
    return own + able


def _probed(
    kernels: list[Kernel], device: torch.device, arguments: argparse.Namespace
) -> dict[str, ProbeResult]:
    """Which of the kernels can run here, by name."""
    from replay.rows.row import HERE
    from replay.workers.environments import Environment
    from replay.workers.execution import InProcess

    if arguments.in_process:
        return InProcess().probe(kernels, device)[HERE]
    environment = Environment(HERE, sys.executable, arguments.timeout)
    try:
        return environment.probe(kernels, str(device))
    finally:
        environment.close()


def _settings(arguments: argparse.Namespace, device: torch.device) -> Settings:
    from replay.bench.settings import Settings

    return Settings(
        device, "warm", tolerances=thresholds(arguments.tolerances and Path(arguments.tolerances))
    )


def _say_what_was_left_out(found: Diagnoses, note: str) -> None:
    said = [note] if note else []
    said += [f"{kernel} does not run every call: {why}" for kernel, why in found.refused.items()]
    said += [f"{reason}; the other calls were examined" for reason in found.unreadable.values()]
    for each in said:
        print(f"replay: {printable(each)}", file=sys.stderr)
