"""The `replay` command. Imports torch only after the arguments are understood."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from capture.arguments import OneSentenceParser, positive
from replay.report import METRICS
from replay.speedcheck.arguments import add_arguments, misuse

if TYPE_CHECKING:
    import torch
    from rich.text import Text

    from replay.environments import Found
    from replay.execution import Allotted, Execution
    from replay.registry import Kernel
    from replay.results import Row
    from replay.settings import Settings
    from replay.timing import Cache
    from replay.workloads import Workload

SUITES = ("flux", "sage", "aiter", "cogvideo", "llama")

EXAMPLES = """examples:
  replay --dir captured_inputs                          every kernel × every recorded call
  replay --dir captured_inputs --metric all             with accuracy, bandwidth and memory
  replay --dir captured_inputs --kernels 'torch-*' --json rows.jsonl
  replay --random -b 2 -hq 24 -sq 4250 -d 64            any shape, no capture needed
  replay --random -hq 32 -hk 8 -sq 1 -sk 8192 -d 128    one decoded token, grouped heads
  replay --suite llama                                  a published list of shapes
  replay --dir captured_inputs --kernels 'torch-*,my_file.py:my_attention'
  replay --dir captured_inputs --kernels 'triton-*decode' --keep 0.05 --also-random
  replay --dir captured_inputs --env fa4=/opt/fa4/bin/python
  replay --dir captured_inputs --e2e                    the kernels back in the model
  replay --dir captured_inputs --plan plan.json --budget cosine=0.998
  replay --list-kernels                                 what there is, and what can run here
"""


class UsageError(Exception):
    """Arguments that make no sense together; the message is for the user."""


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point; exits 0 when fine, 1 when a check failed, 2 on wrong usage."""
    arguments = _parser().parse_args(argv)
    try:
        code = _dispatch(arguments)
    except KeyboardInterrupt:
        print("replay: interrupted", file=sys.stderr)
        code = 130
    except Exception as error:
        if arguments.debug:
            raise
        code = _explain(error)
    sys.exit(code)


def _parser() -> argparse.ArgumentParser:
    parser = OneSentenceParser(
        prog="replay",
        description="Run attention kernels on recorded calls (or random ones): how fast, how "
        "accurate, which to use.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_argument_group("what to replay")
    source = what.add_mutually_exclusive_group()
    source.add_argument("--dir", metavar="DIR", help="a directory that `capture` wrote")
    source.add_argument("--random", action="store_true", help="one shape, given by the flags below")
    source.add_argument("--suite", choices=SUITES, help="a list of shapes, with random values")
    source.add_argument("--list-kernels", action="store_true", help="list kernels and exit")
    what.add_argument("--kernels", metavar="A,B,'GLOB*'", help="default: a few; all: every one")
    what.add_argument(
        "--keep",
        type=_share,
        metavar="SHARE",
        help="share of the keys that sparse kernels keep (default 0.02)",
    )
    what.add_argument(
        "--page-size",
        type=positive,
        metavar="N",
        help="keys in a page of paged kernels (default 16)",
    )
    what.add_argument(
        "--also-random",
        action="store_true",
        help="after each call of --dir, random values of its shapes, strides and mask",
    )
    what.add_argument("--variants", choices=["all"], help="also every variant of those kernels")
    what.add_argument("--max-seq", type=positive, metavar="N", help="leave longer shapes out")
    what.add_argument("--seed", type=int, default=0, help="of random values (default 0)")
    what.add_argument("--device", help="cuda, cpu … (default: cuda where there is one)")

    shape = parser.add_argument_group("shape of --random")
    shape.add_argument("-b", type=int, default=1, metavar="B", help="batch (default 1)")
    shape.add_argument("-hq", type=int, default=16, metavar="HQ", help="query heads (default 16)")
    shape.add_argument("-hk", type=int, metavar="HK", help="key/value heads (default: HQ)")
    shape.add_argument("-sq", type=int, default=1024, metavar="SQ", help="query length")
    shape.add_argument("-sk", type=int, metavar="SK", help="key length (default: SQ)")
    shape.add_argument("-d", type=int, default=64, metavar="D", help="head dimension (default 64)")
    shape.add_argument("-dv", type=int, metavar="DV", help="value head dimension (default: D)")
    shape.add_argument("--causal", action="store_true", help="top-left causal mask")
    shape.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")

    how = parser.add_argument_group("how to measure")
    how.add_argument("--cache", choices=["cold", "warm"], help="L2 cache (default: cold on a GPU)")
    how.add_argument("--rounds", type=positive, default=30, help="samples a kernel (default 30)")
    how.add_argument(
        "--max-seconds",
        type=float,
        default=20.0,
        metavar="S",
        help="per kernel and call; then fewer rounds (default 20)",
    )
    how.add_argument(
        "--baseline-kernel", metavar="K", help="speed-ups are against it (default: the model's own)"
    )

    where = parser.add_argument_group("where kernels run")
    where.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="NAME=PYTHON",
        help="another environment's interpreter; its kernels join the table (repeatable)",
    )
    where.add_argument(
        "--env-file", metavar="TOML", help="environments from a file, [environments]"
    )
    where.add_argument(
        "--timeout",
        type=_seconds,
        default=300.0,
        metavar="S",
        help="end a hanging kernel (default 300)",
    )
    where.add_argument(
        "--in-process", action="store_true", help="no worker processes: a crash ends the run"
    )

    report = parser.add_argument_group("what to report")
    report.add_argument(
        "--metric", default="time,throughput,accuracy", metavar="M", help=", ".join(METRICS)
    )
    report.add_argument(
        "--reference",
        default="gold",
        metavar="R",
        help="errors against gold (high precision, default), captured, or a kernel",
    )
    report.add_argument(
        "--compare-stats", action="store_true", help="min, max, mean, std of outputs"
    )
    report.add_argument(
        "--resources", action="store_true", help="registers, spills, shared memory (Triton)"
    )
    report.add_argument("--per-call", action="store_true", help="a table per call, not per shape")
    report.add_argument("--json", metavar="FILE", help="a JSON object per row (- for stdout)")
    report.add_argument("--resume", action="store_true", help="continue the --json file")
    report.add_argument("--csv", metavar="FILE", help="a line per row (- for stdout)")
    report.add_argument("--save-output", metavar="DIR", help="keep every kernel's outputs")
    report.add_argument("--check", action="store_true", help="exit 1 when a kernel fails accuracy")
    report.add_argument("--debug", action="store_true", help="show tracebacks")
    add_arguments(parser)
    return parser


def _dispatch(arguments: argparse.Namespace) -> int:
    metrics = _metrics(arguments.metric)
    if not (arguments.dir or arguments.random or arguments.suite or arguments.list_kernels):
        raise UsageError("nothing to replay: give --dir DIR, --random or --suite NAME")
    if arguments.also_random and not arguments.dir:
        raise UsageError("--also-random goes with recorded calls: give --dir DIR")
    if arguments.resume and arguments.json in (None, "-"):
        raise UsageError("--resume continues a file: name it with --json FILE")
    if wrong := misuse(arguments):
        raise UsageError(wrong)
    device = _device(arguments.device)

    from replay.environments import interpreters
    from replay.execution import execution

    pythons = interpreters(arguments.env, arguments.env_file)
    if pythons and arguments.in_process:
        raise UsageError("an environment needs a worker process: leave out --in-process or --env")
    with execution(
        in_process=arguments.in_process, interpreters=pythons, timeout=arguments.timeout
    ) as where:
        if arguments.list_kernels:
            return _list_kernels(where, device)
        kernels = _kernels(arguments, where, device)
        settings = _settings(arguments, device)
        workloads, note = _workloads(arguments, device, kernels)
        if note:
            print(f"replay: {note}", file=sys.stderr)
        allotted = where.allot(kernels, settings.device)
        rows = _run(workloads, allotted, settings, where, arguments)
    if "-" not in (arguments.json, arguments.csv):
        _print_tables(rows, settings, metrics, arguments)
    if arguments.plan:
        _plan(rows, arguments)
    if arguments.e2e:
        _check_models(rows, allotted, pythons, settings, arguments)
    return _exit_code(rows, arguments)


def _run(
    workloads: list[Workload],
    allotted: Allotted,
    settings: Settings,
    where: Execution,
    arguments: argparse.Namespace,
) -> list[Row]:
    from replay.results import write_csv, write_jsonl
    from replay.resume import begin_again, finished_rows

    rows: list[Row] = []
    if arguments.resume:
        try:
            rows, workloads = finished_rows(Path(arguments.json), workloads, allotted)
            begin_again(Path(arguments.json), rows)
        except ValueError as error:
            raise UsageError(str(error)) from error

    def kept(produced: Iterator[Row]) -> Iterator[Row]:
        for row in produced:
            rows.append(row)
            yield row

    # Opened first: a run of an hour must not end at a directory that is not there. JSON is written
    # row by row, so an interrupted run keeps what it measured.
    with (
        _opened(arguments.json, append=arguments.resume) as json_file,
        _opened(arguments.csv) as csv_file,
    ):
        with _progress(len(workloads)) as report:
            produced = kept(where.replay(workloads, allotted, settings, report))
            if json_file is not None:
                write_jsonl(produced, json_file)
            for _ in produced:
                pass
        if csv_file is not None:
            write_csv(rows, csv_file)
    return rows


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Callable[[Workload, str], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("replay", total=total)
        order: dict[str, int] = {}

        def report(workload: Workload, stage: str) -> None:
            done = order.setdefault(workload.name, len(order))
            progress.update(task, completed=done, description=f"{workload.name}: {stage}")

        yield report


def _print_tables(
    rows: list[Row], settings: Settings, metrics: list[str], arguments: argparse.Namespace
) -> None:
    from rich.console import Console

    from replay.machine import describe
    from replay.report.table import print_report

    console = Console(highlight=False)
    machine = describe(settings.device)
    versions = ", ".join(
        f"{name} {machine[name]}" for name in ("torch", "cuda", "triton") if name in machine
    )
    console.print(f"{machine['device']} · {versions} · {settings.cache} cache")
    console.print()
    print_report(
        rows,
        console,
        metrics=metrics,
        reference=settings.reference,
        per_call=arguments.per_call,
        compare_stats=settings.compare_stats,
    )


def _plan(rows: list[Row], arguments: argparse.Namespace) -> None:
    from rich.console import Console

    from capture.dataset import Dataset
    from replay.plan import choose, parse_budget, uniform
    from replay.report.plan import print_plan
    from replay.speedcheck.check import OWN

    captures = Dataset.open(arguments.dir).captures
    if len(captures) != 1:
        names = ", ".join(capture.model for capture in captures) or "no manifest"
        raise UsageError(
            f"a plan is for one model and {arguments.dir} holds {names}: record each into a "
            "directory of its own (capture --out DIR)"
        )
    budget, census = parse_budget(arguments.budget), captures[0].census
    plan = choose(rows, census, budget, OWN)
    plan.save(arguments.plan)
    print_plan(plan, uniform(rows, census, budget, OWN), Console(highlight=False))


def _check_models(
    rows: list[Row],
    allotted: Allotted,
    pythons: dict[str, str],
    settings: Settings,
    arguments: argparse.Namespace,
) -> None:
    from rich.console import Console
    from rich.text import Text

    from replay.report.speedcheck import print_checks
    from replay.speedcheck.command import check_models, write_json

    console = Console(highlight=False)
    progress = Console(stderr=True)
    with _opened(arguments.e2e_json) as file, progress.status("") as status:

        def report(stage: str) -> None:
            status.update(Text(stage))

        for checks in check_models(arguments, rows, allotted, pythons, settings, report):
            console.print()
            print_checks(checks, console)
            if file is not None:
                write_json(checks, file)


def _exit_code(rows: list[Row], arguments: argparse.Namespace) -> int:
    unreadable = [row for row in rows if not row.kernel]
    for row in unreadable:
        print(f"replay: {row.reason}; the other calls were replayed", file=sys.stderr)
    harmless = ("ok", "not-timed", "unsupported", "unavailable")
    failed = sorted({f"{row.label} ({row.status})" for row in rows if row.status not in harmless})
    if arguments.check and failed:
        print(f"replay: failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if unreadable or (arguments.check and failed) else 0


def _list_kernels(where: Execution, device: torch.device) -> int:
    """What there is, and per environment whether it can run."""
    from rich.console import Console
    from rich.padding import Padding
    from rich.text import Text

    from replay.registry import catalogue

    console = Console(highlight=False)
    kernels = [kernel for kernel in catalogue().values() if not kernel.variant_of]
    variants = Counter(kernel.variant_of for kernel in catalogue().values())
    found = where.probe(kernels, device)
    for kernel in kernels:
        notes = [] if kernel.default else ["not by default"]
        if variants[kernel.name]:
            notes.append(f"{variants[kernel.name]} variants")
        line = Text(kernel.name, "bold").append(f"  {kernel.about}", "not bold")
        console.print(line.append(f" ({', '.join(notes)})" if notes else "", "not bold"))
        for environment, findings in found.items():
            label = f"{environment}: " if len(found) > 1 else ""
            state = _state(findings[kernel.name])
            console.print(Padding(Text(label).append_text(state), (0, 0, 0, 4)))
    return 0


def _state(found: Found) -> Text:
    from rich.text import Text

    if found.reason is None:
        return Text(f"available {found.version}".strip(), "green")
    # A reason that already names the command needs it no second time.
    missing = found.reason.startswith("not installed") and found.install not in found.reason
    return Text(f"{found.reason}: {found.install}" if missing else found.reason, "yellow")


def _kernels(arguments: argparse.Namespace, where: Execution, device: torch.device) -> list[Kernel]:
    """The chosen kernels. A glob takes what there is; a kernel asked for by name must run.

    Raises:
        UsageError: one that was named cannot run in any environment.
    """
    from replay.registry import find, select

    kernels, names = select(arguments.kernels, variants=arguments.variants == "all")
    special = (arguments.baseline_kernel, arguments.reference)
    names += [name for name in special if name not in (None, "gold", "captured")]
    # A user's own kernel that fails is what the user wants to see in a row.
    named = [kernel for kernel in map(find, names) if kernel.load is None]
    found = where.probe(named, device) if named else {}
    for kernel in named:
        reasons = [findings[kernel.name].reason for findings in found.values()]
        if all(reasons):
            raise UsageError(f"{kernel.name} cannot run on {device}: {reasons[0]}")
    return _with_options(kernels, arguments)


def _with_options(kernels: list[Kernel], arguments: argparse.Namespace) -> list[Kernel]:
    """The kernels with `--keep` and `--page-size`, those that have such options.

    Raises:
        UsageError: none has.
    """
    from replay.registry import catalogue, option_names, with_options

    given = {"keep": arguments.keep, "page_size": arguments.page_size}
    given = {name: value for name, value in given.items() if value is not None}
    for option in given:
        if not any(option in option_names(kernel) for kernel in kernels):
            names = [name for name, each in catalogue().items() if option in option_names(each)]
            raise UsageError(
                f"--{option.replace('_', '-')} is for {', '.join(names)}: choose one by --kernels"
            )
    return [with_options(kernel, given) for kernel in kernels]


def _settings(arguments: argparse.Namespace, device: torch.device) -> Settings:
    from replay.settings import Settings
    from replay.speedcheck.check import OWN

    cache: Cache = arguments.cache or ("cold" if device.type == "cuda" else "warm")
    if cache == "cold" and device.type == "cpu":
        raise UsageError("--cache cold is for GPUs; CPU times are always with a warm cache")
    return Settings(
        device=device,
        cache=cache,
        rounds=arguments.rounds,
        max_seconds=arguments.max_seconds,
        seed=arguments.seed,
        baseline=arguments.baseline_kernel or (OWN if arguments.e2e or arguments.plan else None),
        reference=arguments.reference,
        compare_stats=arguments.compare_stats,
        resources=arguments.resources,
        save_output=Path(arguments.save_output) if arguments.save_output else None,
    )


def _workloads(
    arguments: argparse.Namespace, device: torch.device, kernels: list[Kernel]
) -> tuple[list[Workload], str]:
    from replay import synthetic
    from replay.workloads import from_directory

    if arguments.dir:
        recorded, note = from_directory(arguments.dir)
        if arguments.also_random:
            return synthetic.with_twins(recorded, arguments.seed), note
        return recorded, note
    if arguments.suite:
        specs = synthetic.suite(arguments.suite, arguments.dtype, arguments.max_seq)
        synthetic.check_size(specs, device, _runnable(kernels, device))
        return synthetic.workloads(arguments.suite, specs, arguments.seed), ""
    spec = synthetic.Spec(
        batch=arguments.b,
        q_heads=arguments.hq,
        kv_heads=arguments.hq if arguments.hk is None else arguments.hk,
        q_len=arguments.sq,
        kv_len=arguments.sq if arguments.sk is None else arguments.sk,
        head_dim=arguments.d,
        v_head_dim=arguments.d if arguments.dv is None else arguments.dv,
        is_causal=arguments.causal,
        dtype=synthetic.dtype(arguments.dtype),
    )
    synthetic.check_size([spec], device, _runnable(kernels, device))
    return synthetic.workloads("random", [spec], arguments.seed), ""


def _runnable(kernels: list[Kernel], device: torch.device) -> int:
    """How many kernels there is work for. On a GPU nobody asks, and libraries would be imported."""
    if device.type != "cpu":
        return len(kernels)
    return sum(kernel.load is not None or not kernel.unavailable(device) for kernel in kernels)


def _metrics(text: str) -> list[str]:
    metrics = [part.strip() for part in text.split(",") if part.strip()]
    for metric in metrics:
        if metric not in METRICS:
            near = difflib.get_close_matches(metric, METRICS, n=1, cutoff=0.4)
            hint = f"did you mean {near[0]}?" if near else f"choose from {', '.join(METRICS)}"
            raise UsageError(f"no metric {metric!r}: {hint}")
    if not metrics:
        raise UsageError(f"--metric is empty: choose from {', '.join(METRICS)}")
    return metrics


def _device(name: str | None) -> torch.device:
    import torch

    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError as error:
        raise UsageError(f"--device {name}: {str(error).partition(chr(10))[0]}") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"--device {name}: this PyTorch sees no CUDA device")
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"--device {name}: kernels are timed on cpu and cuda only")
    return device


@contextlib.contextmanager
def _opened(path: str | None, *, append: bool = False) -> Iterator[TextIO | None]:
    if path is None:
        yield None
    elif path == "-":
        yield sys.stdout
    else:
        try:
            file = open(path, "a" if append else "w", newline="")  # noqa: SIM115 - closed below
        except OSError as error:
            raise UsageError(f"cannot write {path}: {error.strerror}") from error
        with file:
            yield file


def _explain(error: Exception) -> int:
    """One sentence for what the user can remedy."""
    from capture.errors import DatasetError
    from replay.counterparts import CensusError
    from replay.environments import WorkerError
    from replay.plan import PlanError
    from replay.registry import KernelNameError
    from replay.speedcheck.process import ModelRefused, RunFailed
    from replay.speedcheck.rebuild import NotRebuildable
    from replay.synthetic import ShapeError

    replaying = (UsageError, DatasetError, KernelNameError, ShapeError, WorkerError)
    of_models = (CensusError, PlanError, ModelRefused, RunFailed, NotRebuildable)
    known: tuple[type[Exception], ...] = replaying + of_models
    if isinstance(error, known):
        print(f"replay: {error}", file=sys.stderr)
        return 2
    print(
        f"replay: unexpected {type(error).__name__}: {error} (traceback with --debug)",
        file=sys.stderr,
    )
    return 1


def _share(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"must be more than 0 and at most 1, not {text}")
    return value


def _seconds(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"must be more than 0, not {text}")
    return value
