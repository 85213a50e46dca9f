"""What can be seen to be wrong before PyTorch is imported, here and in the first processes."""

from __future__ import annotations

import argparse
import ast
import contextlib
import re
from pathlib import Path

from capture.large_imports import import_for_good
from capture.storage.listing import listed_files
from capture.storage.locations import directory_of
from replay.cli.device import device_of
from replay.cli.files import UsageError
from replay.cli.report import check_directory, check_report
from replay.kernels.kernel_names import look_known, parts
from replay.workers.environment_options import interpreters
from replay.workloads.call_names import chosen_names


def check_early(arguments: argparse.Namespace) -> None:
    """Raise what the replay itself would find out seconds later, as far as it is cheap to see.

    PyTorch is imported only where a name of a device or a kernel looks wrong.

    Raises:
        Error: an argument cannot be used.
    """
    if arguments.device and not re.fullmatch("cpu|cuda(:[0-9]+)?", arguments.device):
        device_of(arguments.device)
    if arguments.dir:
        _check_calls(arguments)
    _check_kernels(arguments)
    interpreters(arguments.env, arguments.env_file, are_here=arguments.ray is None)
    if arguments.report:
        check_report(Path(arguments.report))
    if arguments.plot is not None:
        check_directory(arguments.plot)


def _check_calls(arguments: argparse.Namespace) -> None:
    directory = directory_of(arguments.dir)
    if directory is None or arguments.call is None or arguments.join_ranks:
        return
    if files := listed_files(directory):
        # One whose entry is damaged goes by its whole name, which only its header tells.
        chosen_names([Path(file).stem for file in files], arguments.call, files)


def _check_kernels(arguments: argparse.Namespace) -> None:
    special = (arguments.baseline_kernel, arguments.errors_against)
    names = [name for name in special if name not in (None, "reference", "captured")]
    patterns = ",".join(filter(None, (arguments.kernels, *names)))
    if not (arguments.env or arguments.env_file):  # whose Python may be a later one
        for name in parts(patterns):
            _require_python(name)
    if look_known(patterns):
        return
    import_for_good("torch")
    from replay.kernels.registry import find, select

    select(arguments.kernels)
    for name in names:
        find(name)


def _require_python(name: str) -> None:
    """Raise UsageError if a kernel's own file cannot be parsed; nothing of it is run."""
    path, _, _ = name.rpartition(":")
    if not path.endswith(".py"):
        return
    try:
        with contextlib.suppress(OSError, ValueError, RecursionError):
            ast.parse(Path(path).read_bytes())
    except SyntaxError as error:
        raise UsageError(f"no kernel {name!r}: {path}, line {error.lineno}: {error.msg}") from error
