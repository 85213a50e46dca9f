"""`replay verify`: runs the recorded model with each kernel, to measure speed-up and drift."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from attention_replay.errors import Error
from capture.command_line.parser import positive
from replay.api.chosen_device import device_of
from replay.api.recorded_models import ModelRequest, RecordedModels, recorded_models
from replay.api.verify_model import as_json, assignment_of, check_models
from replay.cli.files import check_files, noted, opened, output_file, rows_of
from replay.cli.replayed import Replayed, console_of, exit_code, print_next_step, replayed
from replay.cli.report import write
from replay.cli.requests import chosen, recorded_calls, request_of
from replay.cli.shared_options import TIMING, VerbParser
from replay.report.html import chart_library

if TYPE_CHECKING:
    from replay.end_to_end.model_check import ModelResult
    from replay.rows.row_files import Writable

EXAMPLES = """\
  replay verify --dir captured_inputs --kernels torch-flash,triton-fa3
  replay verify --dir captured_inputs --plan plan.json --rows rows.jsonl
  replay verify --dir captured_inputs --text book.txt --checks checks.jsonl
"""


def parser() -> VerbParser:
    """Build the parser of `replay verify`."""
    command = VerbParser(
        "verify",
        "Run kernels in the recorded model: predicted and measured speed-up, and drift of\n"
        "its output.",
        EXAMPLES,
    )
    what = command.group("the model", "--dir", "--plan")
    what.add_argument(
        "--any-device",
        action="store_true",
        help="use a --plan that was made on another type of GPU",
    )
    what.add_argument(
        "--model-rounds",
        type=positive,
        metavar="N",
        help="timed runs of the model per kernel (default: 6 to 10, as many as fit into 6 s)",
    )
    command.add("--text", to=what)
    what.add_argument(
        "--sketch",
        metavar="FILE",
        help="sketch that `replay foretell` made: foretell the drift beside the measured one",
    )
    what.add_argument(
        "--trust-code",
        action="store_true",
        help="run files of code that the recording or --plan names; files that you name always run",
    )
    command.group(
        "how to measure single calls (without --rows), and where",
        *("--rows", "--kernels", "--backward", *TIMING),
        *("--device", "--env", "--timeout", "--tolerances"),
    )
    shown = command.add_argument_group("what to write")
    shown.add_argument(
        "--checks",
        type=output_file,
        metavar="FILE",
        help="write a JSON object per kernel and model (- for stdout)",
    )
    command.add("--json", "--resume", "--report", "--save-output", "--check", to=shown)
    command.add_common(shown)
    return command


def run(arguments: argparse.Namespace) -> int:
    """Measure, run the models, print and write; return 1 if `--check` fails.

    Raises:
        Error: an argument cannot be used, or no model can run.
    """
    check_files(arguments)
    if arguments.report:
        chart_library.require()
    rows = rows_of(arguments)
    calls = recorded_calls(arguments)
    model = chosen(ModelRequest, arguments)
    model.check()
    request = request_of(arguments, calls, for_model=True, kernels=model.plan_kernels)
    dataset = calls.opened(quiet=arguments.quiet)
    models = recorded_models(model, dataset, arguments.dir, device_of(arguments.device))
    # End the workers before a model is built, because a full-size model needs their memory.
    if rows is None:
        replay = replayed(request, arguments)
    else:
        pythons = request.place.interpreters()
        replay = Replayed(rows, dataset, assignment_of(rows, request.kernels), pythons)
    save_output = arguments.save_output and Path(arguments.save_output).absolute()
    with opened(arguments.checks) as file:
        checks, missing = _checked(models, replay, arguments, save_output, file)
        if arguments.report:
            with noted(replay.unwritten):
                plain = [as_json(check) for check in checks]
                outputs = save_output if checks else None
                write(replay.rows, arguments.report, plain, outputs=outputs)
        if missing and not checks:  # keep an earlier --checks file
            raise Error("; ".join(missing))
    replay.unwritten.extend(missing)
    code = exit_code(replay, checks, check=arguments.check)
    right = [check for check in checks if "run" in check.measured and not check.wrong]
    speedups = {check.kernel: check.measured["run"].speedup for check in right}
    print_next_step(
        arguments,
        replay,
        measured=speedups.get(Path(arguments.plan or "").name),
        is_faster=any(each is not None and each.verdict == "fast" for each in speedups.values()),
        wrong=[check.kernel for check in checks if check.wrong],
    )
    return code


def _checked(
    models: RecordedModels,
    replay: Replayed,
    arguments: argparse.Namespace,
    save_output: Path | None,
    file: Writable | None,
) -> tuple[list[ModelResult], list[str]]:
    """Run the models, print and return the checks, and return a sentence for each missing check."""
    from replay.end_to_end.run_pace import RunPace
    from replay.report.model_tables import print_checks
    from replay.report.progress import shown_runs

    console = console_of(arguments)
    found: list[ModelResult] = []
    missing: list[str] = []
    pace = RunPace()
    with shown_runs(pace, "starting the model", quiet=arguments.quiet) as hidden:
        for result in check_models(
            models,
            replay.rows,
            replay.assigned,
            replay.pythons,
            save_output=save_output,
            pace=pace,
        ):
            if result.trouble:
                missing.append(f"{result.model}: {result.trouble}")
                continue
            found += result.checks
            with hidden():  # else the bar would be drawn into the tables
                console.print()
                print_checks(result.checks, console)
            if file is not None:
                with noted(missing):
                    for check in result.checks:
                        file.write(json.dumps(as_json(check)) + "\n")
                    file.flush()
    return found, missing
