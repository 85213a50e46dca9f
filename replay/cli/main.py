"""The `replay` command. Imports torch only after parsing the arguments."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import errno
import importlib
import logging
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from attention_replay.errors import Error
from capture.command_line.standard_streams import (
    exit_with,
    give_up_stdout,
    is_full_stdout,
    is_of_stdout,
    make_usable,
)
from capture.command_line.verbosity import narrated
from capture.text.printable import printable
from replay.cli import profiling, watch
from replay.cli.arguments import parser
from replay.cli.combinations import misuse, misuse_of_types
from replay.cli.device import device_of
from replay.cli.early_checks import check_early
from replay.cli.files import (
    WRITTEN_FILES,
    UsageError,
    check_place,
    noted,
    opened,
    say_unwritten,
    shared_file,
    stdout_is_taken,
)
from replay.cli.kernels import chosen_kernels, list_kernels, with_given_options
from replay.cli.report import draw
from replay.cli.settings import metrics_of, settings_of, wants
from replay.cli.stdout import reserved_stdout
from replay.cli.time_limit import TimeLimit
from replay.cli.workloads import opened_dataset, workloads_of

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from capture.storage.dataset import Dataset
    from replay.bench.settings import Settings
    from replay.cli.compare import Earlier
    from replay.cli.end_to_end import ModelOptions
    from replay.distribution.ray_cluster import Cluster
    from replay.end_to_end.model_check import ModelResult
    from replay.kernels.registry import Kernel
    from replay.plan.plan import Budget, Plan
    from replay.rows.row import Machine, Row
    from replay.rows.row_files import Writable
    from replay.workers.execution import Assignment, Execution
    from replay.workers.process import First


logger = logging.getLogger(__name__)

SUBCOMMANDS = {
    "compare": "replay.cli.compare",
    "devices": "replay.cli.devices",
    "doctor": "replay.cli.doctor",
    "explain": "replay.cli.explain",
    "report": "replay.cli.report",
    "reproduce": "replay.cli.reproduce",
}
"""Whose `run(argv)` returns the exit code, by the first argument."""

WRITTEN = (*WRITTEN_FILES, "save_output", "plot")
READ = ("dir", "use_plan", "text", "tolerances", "env_file", "spread")
"""Options that name files."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command; exit with 0 on success, 1 if a check failed, 2 on wrong usage."""
    make_usable()
    given = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _subcommand(given)()
    except SystemExit as stopped:
        exit_with("replay", stopped.code)
    except KeyboardInterrupt as stopped:
        told = f": {printable(str(stopped))}" if str(stopped) else ""
        print(f"replay: interrupted{told}", file=sys.stderr)
        code = 130
    except Exception as error:
        if "--debug" in given:
            raise
        code = _explain(error, given)
    exit_with("replay", code)


def _subcommand(given: list[str]) -> Callable[[], int]:
    """What the arguments ask for, once they are parsed."""
    if given and given[0] in SUBCOMMANDS:
        return partial(importlib.import_module(SUBCOMMANDS[given[0]]).run, given[1:])
    if given and not given[0].startswith("-"):
        near = difflib.get_close_matches(given[0], SUBCOMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"choose from {', '.join(SUBCOMMANDS)}"
        if os.path.exists(given[0]):
            hint = f"did you mean {shlex.join(['replay', '--dir', given[0]])}?"
        parser().error(f"no sub-command {given[0]!r}: {hint}")
    arguments = parser().parse_args(given)
    return narrated(arguments.verbose)(partial(_dispatch, arguments, given))


def _file_of_two(arguments: argparse.Namespace) -> str:
    """Say which two options name one file; a baseline may be kept where it was read."""
    wrong = shared_file(arguments, READ, WRITTEN)
    names = {name: getattr(arguments, name) for name in ("compare_to", "save_baseline")}
    if wrong or not any(names.values()):
        return wrong
    from replay.comparison.baselines import is_file

    files = [name for name, given in names.items() if given and is_file(given)]
    read = [name for name in files if name == "compare_to"]
    kept = [name for name in files if name == "save_baseline"]
    return shared_file(arguments, read, WRITTEN) or shared_file(arguments, READ, (*WRITTEN, *kept))


def _dispatch(arguments: argparse.Namespace, given: list[str]) -> int:
    metrics = metrics_of(arguments.metric)
    if wrong := misuse(arguments) or _file_of_two(arguments):
        raise UsageError(wrong)
    for name in WRITTEN_FILES:
        check_place(getattr(arguments, name))
    check_early(arguments)
    if arguments.selftest:
        return _selftest(arguments, device_of(arguments.device))
    if arguments.ncu or arguments.once:
        return _profile(arguments, given)
    limit = TimeLimit(arguments.max_time)
    if arguments.watch:
        watch.watch(arguments, lambda first: _replay(arguments, metrics, [first], limit)[1])
    if arguments.in_process:
        return _replay(arguments, metrics, [], limit)[0]
    if arguments.ray is not None:
        from replay.distribution.ray_cluster import connected

        with connected(arguments.ray) as cluster:
            return _replay(arguments, metrics, [], limit, cluster)[0]
    with _first_processes(arguments, limit) as early:
        return _replay(arguments, metrics, early, limit)[0]


@contextlib.contextmanager
def _first_processes(arguments: argparse.Namespace, limit: TimeLimit) -> Iterator[list[First]]:
    """Those of the device, or of each of `--gpus`, which import PyTorch while this one does."""
    from replay.distribution.device_slots import probable_gpus
    from replay.workers.process import Placement, first_processes

    with contextlib.ExitStack() as stack:
        if arguments.gpus is None:
            place = Placement(stopped=limit.stopped)
            first = stack.enter_context(first_processes(arguments.timeout, place))
            first.prepare(arguments.device)
            if not arguments.list_kernels:
                first.warm_up(arguments.kernels)
            yield [first]
            return
        # They use no device before it is known that no other replay does.
        places = [
            Placement(device.variables, device.cpus, limit.stopped)
            for device in probable_gpus(arguments.gpus)
        ]
        early = [stack.enter_context(first_processes(arguments.timeout, each)) for each in places]
        for first in early:
            first.warm_up(arguments.kernels)
        yield early


def _profile(arguments: argparse.Namespace, given: list[str]) -> int:
    """Print the profiler's command of `--ncu`, or be what it profiles."""
    from replay.kernels.registry import select

    device = device_of(arguments.device)
    kernels, _ = select(arguments.kernels, variants=arguments.variants == "all")
    kernels = with_given_options(kernels, arguments)
    workloads, _ = workloads_of(arguments, opened_dataset(arguments), device, kernels)
    kernel, workload = profiling.only_pair(kernels, workloads)
    if arguments.ncu:
        print(profiling.ncu_command(given))
    else:
        profiling.run_once(kernel, workload, device)
    return 0


def _replay(
    arguments: argparse.Namespace,
    metrics: list[str],
    early: Sequence[First],
    limit: TimeLimit,
    cluster: Cluster | None = None,
) -> tuple[int, list[Row]]:
    """The exit code and the rows.

    Args:
        early: processes that were started before PyTorch is imported here; none to do all here.
    """
    device = device_of(arguments.device) if cluster is None else cluster.device
    # Kernels may change the current directory.
    plots = None if arguments.plot is None else Path(arguments.plot).absolute()

    from replay.cli.run import run
    from replay.cli.tables import print_tables
    from replay.workers.environment_options import interpreters

    pythons = interpreters(arguments.env, arguments.env_file, are_here=cluster is None)
    if pythons and arguments.in_process:
        raise UsageError("environments require worker processes: leave out --in-process or --env")
    dataset = opened_dataset(arguments)
    options = _model_options(arguments, dataset, device)
    with contextlib.ExitStack() as stack, opened(arguments.e2e_json) as models_file:
        with _place_to_run(arguments, device, early, pythons, limit, cluster) as where:
            if arguments.list_kernels:
                list_kernels(where, device)
                return 0, []
            kernels = chosen_kernels(arguments, options, where, device)
            settings = settings_of(arguments, device)
            machines = where.machines(device)
            if wrong := misuse_of_types([machine.device for machine in machines], arguments):
                raise UsageError(wrong)
            earlier = _earlier(arguments, machines[0])
            workloads, note = workloads_of(arguments, dataset, device, kernels)
            unread = "" if arguments.quiet else _no_readings(arguments, device)
            for each in filter(None, (note, unread)):
                print(f"replay: {printable(each)}", file=sys.stderr)
            assigned = where.assign(kernels, settings.device)
            for name, those in assigned.items():
                logger.info("in %s: %s", name, ", ".join(kernel.name for kernel in those))
            replayed = run(workloads, assigned, settings, where, limit, arguments)
            logger.info("every row is there")
        rows, unwritten = replayed.rows, replayed.unwritten
        stack.callback(say_unwritten, unwritten)
        if not stdout_is_taken(arguments) and (rows or replayed.ended_by is None):
            print_tables(rows, machines, settings, metrics, arguments)
        if replayed.ended_by is not None:
            raise replayed.ended_by
        changed = _compare(earlier, rows, arguments, unwritten)
        plan = None
        if options is not None and options.budget is not None:
            with noted(unwritten):
                plan = _plan(options, options.budget, kernels, rows, arguments)
        checks: list[ModelResult] = []
        refused: list[str] = []
        if options is not None and arguments.e2e:
            # The workers have exited: a full-size model needs their memory.
            checks, refused = _check_models(
                options, rows, assigned, pythons, settings, arguments, models_file
            )
        if arguments.report:
            with noted(unwritten):
                _report(rows, checks, options, settings, arguments)
        if plots is not None:
            with noted(unwritten):
                draw(rows, plots)
        if refused and not checks:  # and an earlier --e2e-json stays
            raise Error("; ".join(refused))
        unwritten += refused
    code = max(changed, _exit_code(rows, checks, arguments), 2 if unwritten else 0)
    if not (arguments.quiet or arguments.watch or unwritten or stdout_is_taken(arguments)):
        _print_next_step(arguments, rows, plan, dataset)
    logger.info("all is printed")
    return code, rows


def _place_to_run(
    arguments: argparse.Namespace,
    device: torch.device,
    early: Sequence[First],
    pythons: dict[str, str],
    limit: TimeLimit,
    cluster: Cluster | None,
) -> contextlib.AbstractContextManager[Execution]:
    if cluster is not None:
        return cluster.fleet(pythons, arguments.timeout, limit.stopped)
    if arguments.gpus is None:
        return _one_device(device, early[0] if early else None, pythons, arguments, limit)
    from replay.distribution.device_slots import gpus
    from replay.distribution.fleet import fleet

    return fleet(gpus(arguments.gpus), pythons, arguments.timeout, limit.stopped, early)


@contextlib.contextmanager
def _one_device(
    device: torch.device,
    first: First | None,
    pythons: dict[str, str],
    arguments: argparse.Namespace,
    limit: TimeLimit,
) -> Iterator[Execution]:
    """Say so where another replay measures on it too."""
    from replay.distribution.device_slots import held_if_free
    from replay.workers.execution import execution
    from replay.workers.process import Placement

    place = Placement(stopped=limit.stopped)
    with (
        held_if_free(device) as trouble,
        execution(first, pythons, arguments.timeout, place) as where,
    ):
        if trouble and not arguments.list_kernels:
            print(f"replay: {printable(trouble)}; times are of both together", file=sys.stderr)
        yield where


def _selftest(arguments: argparse.Namespace, device: torch.device) -> int:
    from replay.cli.selftest import run_selftest, write_json
    from replay.report.selftest_table import print_selftest

    with reserved_stdout():
        verdict = run_selftest(device, quiet=arguments.quiet)
    try:
        with opened(arguments.json) as file:
            if file is not None:
                write_json(verdict, file)
    finally:  # also where there is no room for the file
        print_selftest(verdict, _console(arguments))
    return 0 if verdict.passed else 1


def _model_options(
    arguments: argparse.Namespace, dataset: Dataset | None, device: torch.device
) -> ModelOptions | None:
    """Read the options of `--e2e` and `--plan`; None without either."""
    if not (arguments.e2e or arguments.plan):
        return None
    from replay.cli.end_to_end import read_options

    return read_options(arguments, dataset, str(device))


def _print_next_step(
    arguments: argparse.Namespace, rows: list[Row], plan: Plan | None, dataset: Dataset | None
) -> None:
    from replay.cli.next_step import next_step

    if step := next_step(arguments, rows, plan, dataset):
        # Not wrapped: a command that is broken into lines cannot be pasted.
        print(f"next: {printable(step)}", file=sys.stderr)


def _console(arguments: argparse.Namespace) -> Console:
    """Print tables to stdout, or to stderr if stdout carries JSON or CSV."""
    from rich.console import Console

    return Console(highlight=False, stderr=stdout_is_taken(arguments))


def _earlier(arguments: argparse.Namespace, machine: Machine) -> Earlier | None:
    """Read what the rows will be compared with; None without `--compare-to`."""
    if arguments.compare_to is None and arguments.save_baseline is None:
        return None
    from replay.cli.compare import read_earlier

    return read_earlier(arguments, machine)


def _compare(
    earlier: Earlier | None, rows: list[Row], arguments: argparse.Namespace, unwritten: list[str]
) -> int:
    """Compare with `--compare-to`, keep as `--save-baseline`; 1 if a `--fail-on` holds."""
    from replay.cli.compare import compare_with, keep
    from replay.comparison.baselines import machine_of

    code = 0
    with noted(unwritten):
        code = 0 if earlier is None else compare_with(earlier, rows, _console(arguments))
    if arguments.save_baseline is not None:
        with noted(unwritten):
            keep(arguments.save_baseline, rows, machine_of(rows))
    return code


def _plan(
    options: ModelOptions,
    budget: Budget,
    kernels: Sequence[Kernel],
    rows: list[Row],
    arguments: argparse.Namespace,
) -> Plan:
    from replay.end_to_end.census_check import shortfall
    from replay.end_to_end.model_process import OWN
    from replay.plan.choose import choose, uniform
    from replay.report.plan_tables import print_plan

    census = options.captures[0].census
    exclusive = {kernel.name for kernel in kernels if kernel.own_process}
    plan = choose(rows, census, budget, OWN, exclusive)
    if short := shortfall(options.captures[0]):
        print(f"replay: {printable(short)}", file=sys.stderr)
    print_plan(plan, uniform(rows, census, budget, OWN), _console(arguments))
    plan.save(arguments.plan)
    return plan


def _check_models(
    options: ModelOptions,
    rows: list[Row],
    assigned: Assignment,
    pythons: dict[str, str],
    settings: Settings,
    arguments: argparse.Namespace,
    file: Writable | None,
) -> tuple[list[ModelResult], list[str]]:
    """What was found, and what is missing, a sentence each."""
    from rich.console import Console
    from rich.text import Text

    from replay.cli.end_to_end import check_model, write_json
    from replay.report.model_tables import print_checks

    console, stages = _console(arguments), [""]
    found: list[ModelResult] = []
    missing: list[str] = []
    with Console(stderr=True, quiet=arguments.quiet).status("") as status:

        def report(stage: str) -> None:
            if stage != stages[-1]:
                logger.info("%s", stage)
                stages.append(stage)
            status.update(Text(printable(stage)))

        for capture, build in zip(options.captures, options.builds, strict=True):
            try:
                checks = check_model(
                    capture, build, options, arguments, rows, assigned, pythons, settings, report
                )
            except Error as error:
                missing.append(f"{capture.model}: {error}")
                continue
            found += checks
            status.stop()  # the spinner would be drawn into the tables
            console.print()
            print_checks(checks, console)
            status.start()
            if file is not None:
                with noted(missing):
                    write_json(checks, file)
                    file.flush()
    return found, missing


def _report(
    rows: list[Row],
    checks: list[ModelResult],
    options: ModelOptions | None,
    settings: Settings,
    arguments: argparse.Namespace,
) -> None:
    from replay.cli.end_to_end import as_json
    from replay.cli.report import write

    outputs = settings.save_output if checks else None
    budget = None if options is None else options.budget
    plain = [as_json(checked) for checked in checks]
    write(rows, plain, Path(arguments.report), outputs, budget)


def _exit_code(rows: list[Row], checks: list[ModelResult], arguments: argparse.Namespace) -> int:
    unreadable = [row for row in rows if not row.kernel]
    was_any = len(unreadable) < len(rows)
    rest = "the other calls were replayed" if was_any else "no call could be replayed, record anew"
    for row in unreadable:
        print(f"replay: {printable(row.reason)}; {rest}", file=sys.stderr)
    harmless = ("ok", "not-timed", "unsupported", "unavailable")
    failed = {f"{row.id} ({row.status})" for row in rows if row.status not in harmless}
    failed |= {
        f"{each.kernel} in {each.model} ({each.status})" for each in checks if each.status != "ok"
    }
    if arguments.check and failed:
        print(f"replay: failed: {printable(', '.join(sorted(failed)))}", file=sys.stderr)
    return 1 if unreadable or (arguments.check and failed) else 0


def _no_readings(arguments: argparse.Namespace, device: torch.device) -> str:
    """Say once what no row will tell of the machine, and why."""
    from replay.timing.gpu_state import why_no_state

    if arguments.ray is not None:
        return ""  # what is true here says nothing of the nodes
    if device.type == "cpu" and wants(arguments, "energy"):
        return "energy needs an NVIDIA GPU"
    return why_no_state(device)


def _explain(error: BaseException, given: list[str]) -> int:
    """Print an error in one sentence and return the exit code."""
    from capture.errors import MissingPackage

    error = MissingPackage.behind(error)
    if isinstance(error, Error):
        print(f"replay: {printable(str(error))}", file=sys.stderr)
        return 2
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        named = printable(str(error.filename))
        print(f"replay: {named}: {error.strerror}, name another", file=sys.stderr)
        return 2
    if isinstance(error, OSError) and is_of_stdout(error) and _is_stdouts_own(error):
        return give_up_stdout("replay", error)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        named = f" {printable(str(error.filename))}" if error.filename else ""
        remedy = "make room" + ("; --resume continues the --json file" if _keeps(given) else "")
        print(f"replay: cannot write{named}: {error.strerror}: {remedy}", file=sys.stderr)
        return 2
    text = printable(str(error))
    print(
        f"replay: unexpected {type(error).__name__}: {text} (traceback with --debug)",
        file=sys.stderr,
    )
    return 1


def _is_stdouts_own(error: OSError) -> bool:
    # That the disk is full is said without a name of any file that is being written.
    return isinstance(error, BrokenPipeError) or is_full_stdout()


def _keeps(given: list[str]) -> bool:
    """Whether rows were written to a file, which `--resume` continues."""
    if given and given[0] in SUBCOMMANDS:
        return False
    return parser().parse_args(given).json not in (None, "-")
