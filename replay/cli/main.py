"""The `replay` command. Imports torch only after the arguments are understood."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from attention_replay import Error
from replay.cli.arguments import parser
from replay.cli.end_to_end_arguments import misuse
from replay.rows.fields import METRICS
from replay.timing.defaults import CALLS_BEFORE_IN_MODELS, CPU_SECONDS, SECONDS

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from replay.bench.settings import Settings
    from replay.cli.end_to_end import Wanted
    from replay.end_to_end.check import Checked
    from replay.kernels.registry import Kernel
    from replay.rows.row import Row
    from replay.timing.timer import Cache
    from replay.workers.execution import Assignment, Execution
    from replay.workloads.recorded import Workload


class UsageError(Error):
    """Arguments that make no sense together; the message is for the user."""


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point; exits 0 when fine, 1 when a check failed, 2 on wrong usage."""
    arguments = parser().parse_args(argv)
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

    from replay.workers.environments import interpreters
    from replay.workers.execution import execution

    pythons = interpreters(arguments.env, arguments.env_file)
    if pythons and arguments.in_process:
        raise UsageError("an environment needs a worker process: leave out --in-process or --env")
    wanted = _wanted(arguments, device)
    # Opened first, like the other files: a run of an hour must not end at a missing directory.
    with _opened(arguments.e2e_json) as models_file:
        with execution(
            in_process=arguments.in_process, interpreters=pythons, timeout=arguments.timeout
        ) as where:
            if arguments.list_kernels:
                _list_kernels(where, device)
                return 0
            kernels = _kernels(arguments, wanted, where, device)
            settings = _settings(arguments, device)
            workloads, note = _workloads(arguments, device, kernels)
            if note:
                print(f"replay: {note}", file=sys.stderr)
            assigned = where.assign(kernels, settings.device)
            rows = _run(workloads, assigned, settings, where, arguments)
        if "-" not in (arguments.json, arguments.csv):
            _print_tables(rows, settings, metrics, arguments)
        if wanted is None:
            return _exit_code(rows, [], arguments)
        if arguments.plan:
            _plan(wanted, kernels, rows, arguments)
        checks: list[Checked] = []
        if arguments.e2e:
            # The workers have ended: a model of full size needs their memory.
            checks = _check_models(
                wanted, rows, assigned, pythons, settings, arguments, models_file
            )
    return _exit_code(rows, checks, arguments)


def _wanted(arguments: argparse.Namespace, device: torch.device) -> Wanted | None:
    """What is asked of whole models, if anything."""
    if not (arguments.e2e or arguments.plan):
        return None
    from replay.cli.end_to_end import understand

    return understand(arguments, str(device))


def _run(
    workloads: list[Workload],
    assigned: Assignment,
    settings: Settings,
    where: Execution,
    arguments: argparse.Namespace,
) -> list[Row]:
    from replay.bench.resume import begin_again, finished_rows
    from replay.rows.files import write_csv, write_jsonl
    from replay.timing.machine import describe

    rows: list[Row] = []
    if arguments.resume:
        try:
            machine = describe(settings.device)
            rows, workloads = finished_rows(
                Path(arguments.json), workloads, assigned, machine, settings
            )
            begin_again(Path(arguments.json), rows)
        except ValueError as error:
            raise UsageError(str(error)) from error

    def kept(produced: Iterator[Row]) -> Iterator[Row]:
        for row in produced:
            rows.append(row)
            yield row

    # JSON is written row by row, so an interrupted run keeps what it measured.
    with (
        _opened(arguments.json, append=arguments.resume) as json_file,
        _opened(arguments.csv) as csv_file,
    ):
        with _progress(len(workloads)) as report:
            produced = kept(where.replay(workloads, assigned, settings, report))
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

    from replay.report.table import print_report
    from replay.timing.machine import describe

    console = Console(highlight=False)
    machine = describe(settings.device)
    versions = ", ".join(
        f"{name} {version}"
        for name in ("torch", "cuda", "triton")
        if (version := getattr(machine, name))
    )
    before = settings.calls_before
    lead = f" · {before} call{'s' * (before != 1)} before each sample" if before else ""
    console.print(f"{machine.device} · {versions} · {settings.cache} cache{lead}")
    console.print()
    print_report(
        rows,
        console,
        metrics=metrics,
        errors_against=settings.errors_against,
        per_call=arguments.per_call,
        compare_stats=settings.compare_stats,
    )


def _console(arguments: argparse.Namespace) -> Console:
    """Tables go to stdout, unless that is taken by a machine format."""
    from rich.console import Console

    taken = "-" in (arguments.json, arguments.csv, arguments.e2e_json)
    return Console(highlight=False, stderr=taken)


def _plan(
    wanted: Wanted, kernels: Sequence[Kernel], rows: list[Row], arguments: argparse.Namespace
) -> None:
    from replay.end_to_end.model_process import OWN
    from replay.plan.choose import choose, uniform
    from replay.report.plan import print_plan

    budget, census = wanted.budget, wanted.captures[0].census
    assert budget is not None
    exclusive = {kernel.name for kernel in kernels if kernel.own_process}
    plan = choose(rows, census, budget, OWN, exclusive)
    plan.save(arguments.plan)
    print_plan(plan, uniform(rows, census, budget, OWN), _console(arguments))


def _check_models(
    wanted: Wanted,
    rows: list[Row],
    assigned: Assignment,
    pythons: dict[str, str],
    settings: Settings,
    arguments: argparse.Namespace,
    file: TextIO | None,
) -> list[Checked]:
    from rich.console import Console
    from rich.text import Text

    from replay.cli.end_to_end import check_models, write_json
    from replay.report.end_to_end import print_checks

    console, found = _console(arguments), []
    with Console(stderr=True).status("") as status:

        def report(stage: str) -> None:
            status.update(Text(stage))

        produced = check_models(wanted, arguments, rows, assigned, pythons, settings, report)
        for checks in produced:
            found += checks
            status.stop()  # it would draw itself into the tables
            console.print()
            print_checks(checks, console)
            status.start()
            if file is not None:
                write_json(checks, file)
                file.flush()
    return found


def _exit_code(rows: list[Row], checks: list[Checked], arguments: argparse.Namespace) -> int:
    unreadable = [row for row in rows if not row.kernel]
    for row in unreadable:
        print(f"replay: {row.reason}; the other calls were replayed", file=sys.stderr)
    harmless = ("ok", "not-timed", "unsupported", "unavailable")
    failed = {f"{row.id} ({row.status})" for row in rows if row.status not in harmless}
    failed |= {
        f"{each.kernel} in {each.model} ({each.status})" for each in checks if each.status != "ok"
    }
    if arguments.check and failed:
        print(f"replay: failed: {', '.join(sorted(failed))}", file=sys.stderr)
    return 1 if unreadable or (arguments.check and failed) else 0


def _list_kernels(where: Execution, device: torch.device) -> None:
    from rich.console import Console

    from replay.kernels.registry import catalogue
    from replay.report.kernels import print_kernels

    kernels = list(catalogue().values())
    found = where.probe([kernel for kernel in kernels if not kernel.variant_of], device)
    print_kernels(kernels, found, Console(highlight=False))


def _kernels(
    arguments: argparse.Namespace, wanted: Wanted | None, where: Execution, device: torch.device
) -> list[Kernel]:
    """The chosen kernels; without a choice, those of the plan to use, or the default ones. A glob
    takes what there is; a kernel asked for by name must run.

    Raises:
        UsageError: one that was named cannot run in any environment.
    """
    from replay.kernels.registry import find, select

    patterns = arguments.kernels
    if patterns is None and wanted is not None and wanted.plan is not None:
        patterns = ",".join([wanted.plan.baseline, *wanted.plan.kernels])
    kernels, names = select(patterns, variants=arguments.variants == "all")
    special = (arguments.baseline_kernel, arguments.errors_against)
    names += [name for name in special if name not in (None, "reference", "captured")]
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
    from replay.kernels.registry import catalogue, option_names, with_options

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
    from replay.bench.settings import Settings
    from replay.end_to_end.model_process import OWN

    of_models = bool(arguments.e2e or arguments.plan)
    cache: Cache = arguments.cache or ("cold" if device.type == "cuda" else "warm")
    if cache == "cold" and device.type == "cpu":
        raise UsageError("--cache cold is for GPUs; CPU times are always with a warm cache")
    calls_before = arguments.calls_before
    if calls_before is None:
        calls_before = CALLS_BEFORE_IN_MODELS if of_models and device.type == "cuda" else 0
    return Settings(
        device=device,
        cache=cache,
        rounds=arguments.rounds,
        calls_before=calls_before,
        max_seconds=arguments.max_seconds or (CPU_SECONDS if device.type == "cpu" else SECONDS),
        seed=arguments.seed,
        baseline=arguments.baseline_kernel or (OWN if of_models else None),
        errors_against=arguments.errors_against,
        compare_stats=arguments.compare_stats,
        resources=arguments.resources,
        save_output=Path(arguments.save_output) if arguments.save_output else None,
    )


def _workloads(
    arguments: argparse.Namespace, device: torch.device, kernels: list[Kernel]
) -> tuple[list[Workload], str]:
    from replay.bench.feasibility import check_size
    from replay.workloads import random_calls
    from replay.workloads.recorded import from_directory

    if arguments.dir:
        recorded, note = from_directory(arguments.dir)
        if arguments.also_random:
            return random_calls.with_twins(recorded, arguments.seed), note
        return recorded, note
    if arguments.suite:
        specs = random_calls.suite(arguments.suite, arguments.dtype, arguments.max_seq)
        check_size(specs, device, _runnable(kernels, device))
        return random_calls.workloads(arguments.suite, specs, arguments.seed), ""
    spec = random_calls.Spec(
        batch=arguments.b,
        q_heads=arguments.hq,
        kv_heads=arguments.hq if arguments.hk is None else arguments.hk,
        q_len=arguments.sq,
        kv_len=arguments.sq if arguments.sk is None else arguments.sk,
        head_dim=arguments.d,
        v_head_dim=arguments.d if arguments.dv is None else arguments.dv,
        is_causal=arguments.causal,
        dtype=random_calls.dtype(arguments.dtype),
    )
    check_size([spec], device, _runnable(kernels, device))
    return random_calls.workloads("random", [spec], arguments.seed), ""


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
    from capture.errors import MissingPackage

    error = MissingPackage.behind(error)
    if isinstance(error, Error):
        print(f"replay: {error}", file=sys.stderr)
        return 2
    print(
        f"replay: unexpected {type(error).__name__}: {error} (traceback with --debug)",
        file=sys.stderr,
    )
    return 1
