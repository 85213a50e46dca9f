"""`replay foretell`: makes a sketch, and foretells the drift of kernels and plans from it."""

from __future__ import annotations

import argparse

from attention_replay.errors import Error
from capture.command_line.run_options import add_run_options, load_run, model_is_required
from capture.text.printable import printable
from replay.api.chosen_kernels import check_kernels
from replay.api.foretell_model import foretell_runnable
from replay.api.messages import shown_steps
from replay.api.recorded_models import ModelRequest
from replay.cli.files import check_files, output_file
from replay.cli.shared_options import VerbParser
from replay.cli.tune import prompts_of

EXAMPLES = """\
  replay foretell --model flux --prompts prompts.txt --kernels 'triton-*'
  replay foretell --model llama --text book.txt --plan plan.json
  replay verify --dir flux_inputs --plan plan.json --sketch sketch.safetensors
"""


def parser() -> VerbParser:
    """Build the parser of `replay foretell`."""
    command = VerbParser(
        "foretell",
        "Foretell the drift of a model's output with any plan, from 40 passes with gradients:\n"
        "how an error at each layer and step reaches the output.",
        EXAMPLES,
    )
    add_run_options(command)
    how = command.add_argument_group("how to foretell")
    command.add("--prompts", to=how, help="prompts, one a line: best 13, not judged later")
    command.add("--text", "--kernels", to=how)
    command.add("--plan", to=how, help="also foretell the drift of this plan")
    shown = command.add_argument_group("what to write")
    shown.add_argument(
        "--out",
        type=output_file,
        default="sketch.safetensors",
        metavar="FILE",
        help="write the sketch, for `replay verify --sketch` (default sketch.safetensors)",
    )
    command.add_common(shown)
    return command


def run(arguments: argparse.Namespace) -> int:
    """Make a sketch, and print the drift of each kernel at every place, and of the plan.

    Raises:
        Error: an argument cannot be used, or the model cannot be built or differentiated.
    """
    if not arguments.model:
        raise Error(model_is_required())
    if arguments.out == "-":
        raise Error("--out needs a file: name one")
    check_files(arguments)
    prompts = prompts_of(arguments)
    request = ModelRequest(text=arguments.text, plan=arguments.plan, trust_code=True)
    request.check()
    kernels = arguments.kernels
    if kernels is None and request.loaded_plan is not None:
        kernels = ",".join(request.loaded_plan.kernels) or None
    check_kernels(kernels, [], guess=False)
    with shown_steps(quiet=arguments.quiet) as step:
        step(f"loading {arguments.model} …")
        runnable = load_run(arguments)
    sketch = foretell_runnable(
        runnable,
        prompts=prompts,
        text=request.words,
        kernels=kernels,
        out=arguments.out,
        quiet=arguments.quiet,
    )
    from rich.console import Console

    from replay.report.foretold import print_foretold, quality_paragraph
    from replay.sketches.worst_places import foretold_drift

    console = Console(highlight=False)
    print_foretold(sketch, console)
    if request.loaded_plan is not None:
        found = foretold_drift(sketch, request.loaded_plan)
        console.print(printable(quality_paragraph(arguments.plan, found)))
    return 0
