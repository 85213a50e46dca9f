"""The kernels that the arguments choose, and `--list-kernels`. Imports torch late."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import TYPE_CHECKING

from replay.cli.files import UsageError

if TYPE_CHECKING:
    import torch

    from replay.cli.end_to_end import ModelOptions
    from replay.kernels.registry import Kernel
    from replay.workers.execution import Execution


def chosen_kernels(
    arguments: argparse.Namespace,
    options: ModelOptions | None,
    where: Execution,
    device: torch.device,
) -> list[Kernel]:
    """Select the kernels: the given ones, else those of `--use-plan`, else the defaults.

    A glob matches whatever is available; a kernel given by name must be able to run.

    Raises:
        UsageError: a kernel given by name cannot run in any environment.
    """
    from replay.kernels.registry import find, select

    patterns = arguments.kernels
    if patterns is None and options is not None and options.plan is not None:
        patterns = ",".join([options.plan.baseline, *options.plan.kernels])
    kernels, names = select(patterns, variants=arguments.variants == "all")
    special = (arguments.baseline_kernel, arguments.errors_against)
    names += [name for name in special if name not in (None, "reference", "captured")]
    # The failure of a user's own kernel is reported in its row.
    named = [kernel for kernel in map(find, names) if kernel.load is None]
    found = where.probe(named, device) if named else {}
    for kernel in named:
        reasons = [findings[kernel.name].reason for findings in found.values()]
        if all(reasons):
            raise UsageError(f"{kernel.name} cannot run on {device}: {reasons[0]}")
    return with_given_options(kernels, arguments)


def with_given_options(kernels: list[Kernel], arguments: argparse.Namespace) -> list[Kernel]:
    """Apply `--keep` and `--page-size` to the kernels that have these options.

    Raises:
        UsageError: no kernel has one that was given.
    """
    from replay.kernels.registry import catalogue, option_names, with_options

    given = {"keep": arguments.keep, "page_size": arguments.page_size}
    given = {name: value for name, value in given.items() if value is not None}
    for option in given:
        if not any(option in option_names(kernel) for kernel in kernels):
            names = [name for name, each in catalogue().items() if option in option_names(each)]
            raise UsageError(
                f"--{option.replace('_', '-')} requires one of {', '.join(names)}: add it to "
                "--kernels"
            )
    return [with_options(kernel, given) for kernel in kernels]


def able_kernels(kernels: Iterable[Kernel], device: torch.device) -> list[Kernel]:
    """Those that can run on a CPU; on a GPU all, lest their libraries be imported here."""
    return [
        kernel
        for kernel in kernels
        if device.type != "cpu" or kernel.load is not None or not kernel.unavailable(device)
    ]


def list_kernels(where: Execution, device: torch.device) -> None:
    """Print every kernel, and which can run here."""
    from rich.console import Console

    from replay.kernels.registry import catalogue
    from replay.report.kernel_list import print_kernels

    kernels = list(catalogue().values())
    found = where.probe([kernel for kernel in kernels if not kernel.variant_of], device)
    print_kernels(kernels, found, Console(highlight=False))
