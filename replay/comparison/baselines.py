"""Runs kept under a name to compare later ones with: for each type of machine, its own.

They lie in `$XDG_DATA_HOME/attention-replay/baselines` (by default in `~/.local/share`), in a
directory per machine. A name with a path separator, or one that ends in `.jsonl`, is a file, as in
a repository that keeps its baseline beside the code.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from replay.comparison.row_matching import ComparisonError, Run
from replay.rows.row import Machine, Row
from replay.rows.row_files import StoredRows, read_jsonl, save_jsonl

NAME = re.compile(r"[A-Za-z0-9][\w.+-]*", re.ASCII)

SUFFIX = ".jsonl"


def directory() -> Path:
    """Where baselines are kept."""
    data = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(data) / "attention-replay" / "baselines"


def machine_type(machine: Machine) -> str:
    """A directory's name for machines whose times may be compared, e.g. `nvidia-h200`.

    Of a processor, with the number of its threads that PyTorch used.
    """
    told = f"{machine.device} {machine.threads} threads" if machine.threads else machine.device
    return re.sub(r"[^a-z0-9]+", "-", told.lower()).strip("-") or "unknown"


def is_file(name: str) -> bool:
    """Whether a baseline's name is a path."""
    return "/" in name or os.sep in name or name.endswith(SUFFIX)


def location(name: str, machine: Machine) -> Path:
    """The file of a baseline.

    Raises:
        ComparisonError: it is neither a name nor a path.
    """
    if is_file(name):
        return Path(name)
    if not NAME.fullmatch(name):
        raise ComparisonError(
            f"{name!r} cannot be a baseline's name: use letters, digits, '-', '_' and '.', or a "
            "path"
        )
    return directory() / machine_type(machine) / f"{name}{SUFFIX}"


def place(name: str, machine: Machine) -> Path:
    """The file of a baseline that is to be kept; the directory of a name is made.

    Raises:
        ComparisonError: it is neither a name nor a path, or there can be no such directory.
    """
    path = location(name, machine)
    if not is_file(name):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ComparisonError(
                f"cannot make {path.parent} ({error.strerror}): name a file, e.g. {path.name}"
            ) from error
    return path


def load(name: str, machine: Machine) -> Run:
    """Read a baseline of a machine's type, or a file.

    Raises:
        ComparisonError: there is none.
        RowsError: it holds something other than rows of this version.
    """
    path = location(name, machine)
    try:
        return as_run(name, read_jsonl(path))
    except FileNotFoundError:
        if is_file(name):
            raise ComparisonError(f"{name}: no such file") from None
        raise ComparisonError(
            f"no baseline {name!r} of {machine.device or 'this machine'}: {_others(machine)}"
        ) from None


def save(name: str, rows: Sequence[Row], machine: Machine) -> Path:
    """Keep the rows of a run; one of the same name and type of machine is replaced.

    Raises:
        ComparisonError: the name cannot be used, or there are no rows.
        RowsError: the file cannot be written.
    """
    if not rows:
        raise ComparisonError(f"no rows to keep as baseline {name!r}")
    path = place(name, machine)
    save_jsonl(rows, path)
    return path


def as_run(name: str, stored: StoredRows) -> Run:
    """The rows of a file, as a run.

    Raises:
        ComparisonError: there are none.
    """
    if not stored.rows:
        raise ComparisonError(f"{name} holds no rows: write it with `replay --json`")
    return Run(name, stored.rows, stored.is_cut_off)


def machine_of(rows: Sequence[Row]) -> Machine:
    """What most rows of this process' own environment were measured on."""
    machines = [row.machine for row in rows if row.machine.device]
    return max(machines, key=machines.count) if machines else Machine()


def _others(machine: Machine) -> str:
    """What baselines there are, of a machine's type and of others."""
    here = directory() / machine_type(machine)
    own = sorted(path.stem for path in here.glob(f"*{SUFFIX}"))
    others = sorted(
        f"{path.stem} ({path.parent.name})"
        for path in directory().glob(f"*/*{SUFFIX}")
        if path.parent != here
    )
    told = [
        f"{whose} machine has {', '.join(names)}"
        for whose, names in (("this type of", own), ("another type of", others))
        if names
    ]
    return " and ".join(told) or "keep one with --save-baseline"
