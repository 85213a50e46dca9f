"""Choice of the kernels: names are checked before PyTorch is imported, and selected afterwards."""

from __future__ import annotations

import ast
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from capture.large_imports import import_large
from replay.api.chosen_device import ChoiceError
from replay.kernels.declared_arguments import SignatureError, check_source
from replay.kernels.kernel_names import function_of, look_known, parts

if TYPE_CHECKING:
    import torch

    from replay.kernels.registry import Kernel
    from replay.workers.execution import Execution


def check_kernels(
    names: str | None, special: Sequence[str], *, parse_files: bool = True, guess: bool = True
) -> None:
    """Raise Error if a kernel is unknown, or its file cannot be parsed or its function called.

    Args:
        names: comma-separated names and globs; None for the default kernels.
        special: kernels that serve as baseline or as the output to compare with.
        parse_files: True if this Python runs the kernels, so it must be able to parse their files.
        guess: True to import PyTorch only if a name seems to be unknown, which misses some.
    """
    patterns = ",".join(filter(None, (names, *special)))
    for name in parts(patterns) if parse_files else []:
        path, _, function = name.rpartition(":")
        if not path.endswith(".py"):
            continue
        if not os.path.isfile(path):
            raise ChoiceError(f"no kernel {name!r}: there is no file {path}")
        try:
            check_source(ast.parse(Path(path).read_bytes()), function_of(path, function))
        except SyntaxError as error:
            where = f"{path}, line {error.lineno}"
            raise ChoiceError(f"no kernel {name!r}: {where}: {error.msg}") from error
        except SignatureError as error:
            raise ChoiceError(f"no kernel {name!r}: {error}") from error
        except (OSError, ValueError, RecursionError):
            pass  # importing the file will tell
    if guess and look_known(patterns):
        return
    import_large("torch")
    from replay.kernels.registry import find, select

    select(names)
    for name in special:
        find(name)


def chosen_kernels(
    names: str | None,
    special: Sequence[str],
    where: Execution,
    device: torch.device,
    *,
    workers: bool = True,
) -> list[Kernel]:
    """Return the kernels to run.

    A glob matches only available kernels; a kernel given by name must be able to run.

    Args:
        names: comma-separated names and globs; None for the default kernels.
        special: kernels that serve as baseline or as the output to compare with.
        where: the workers or this process, where the kernels will run.
        workers: False if this process runs the kernels.

    Raises:
        ChoiceError: a kernel given by name cannot run in any environment, or a worker cannot import
            a registered function.
    """
    from replay.kernels.registry import find, select

    kernels, named = select(names)
    asked = [find(name) for name in (*named, *special)]
    if workers:
        check_importable([*kernels, *asked])
    # Do not probe a user's own kernel: its row reports a failure instead.
    asked = [kernel for kernel in asked if not kernel.source]
    found = where.probe(asked, device) if asked else {}
    for kernel in asked:
        reasons = [findings[kernel.name].reason for findings in found.values()]
        if all(reasons):
            raise ChoiceError(f"{kernel.name} cannot run on {device}: {reasons[0]}")
    return kernels


def check_importable(kernels: Sequence[Kernel]) -> None:
    """Raise ChoiceError if a worker cannot import a function that this process registered."""
    from replay.kernels.registered_functions import address_of

    for kernel in kernels:
        if kernel.source and kernel.load is None and not address_of(kernel.attention):
            raise ChoiceError(
                f"a worker process cannot import the function of {kernel.name}: define it at the "
                "top level of a file, or pass workers=False to run it here, unranked"
            )


def able_kernels(kernels: Sequence[Kernel], device: torch.device) -> list[Kernel]:
    """Return the kernels that can run on a CPU; on a GPU, return all, to avoid library imports."""
    return [
        kernel
        for kernel in kernels
        if device.type != "cpu" or kernel.load is not None or not kernel.unavailable(device)
    ]
