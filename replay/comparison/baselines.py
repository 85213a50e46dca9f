"""Runs stored under a name, for comparison with later runs; each type of machine has its own.

Baselines are stored in `$XDG_DATA_HOME/attention-replay/baselines` (default: `~/.local/share`), in
a directory per machine. A name with a path separator or with the ending `.jsonl` denotes a file
instead, for repositories that keep a baseline next to their code.
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
    """Return the directory that holds all baselines."""
    data = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(data) / "attention-replay" / "baselines"


def machine_type(machine: Machine) -> str:
    """Return a directory name for machines whose times may be compared, e.g. `nvidia-h200`.

    A processor's directory name includes the number of threads that PyTorch used.
    """
    text = f"{machine.device} {machine.threads} threads" if machine.threads else machine.device
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "unknown"


def is_file(name: str) -> bool:
    """Return True if a baseline's name is a path."""
    return "/" in name or os.sep in name or name.endswith(SUFFIX)


def location(name: str, machine: Machine) -> Path:
    """Return the file of a baseline.

    Raises:
        ComparisonError: the name is neither a valid name nor a path.
    """
    if is_file(name):
        return Path(name)
    if not NAME.fullmatch(name):
        raise ComparisonError(
            f"invalid baseline name {name!r}: use letters, digits, '-', '_' and '.', or a path"
        )
    return directory() / machine_type(machine) / f"{name}{SUFFIX}"


def place(name: str, machine: Machine) -> Path:
    """Return the file to write a baseline to; create the directory of a named baseline.

    Raises:
        ComparisonError: the name is invalid, or the directory cannot be created.
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
    """Read a stored baseline for this type of machine, or a file.

    Raises:
        ComparisonError: the baseline does not exist.
        RowsError: the file holds something other than rows of this version.
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
    """Store the rows of a run, replacing an earlier baseline of that name and machine type.

    Raises:
        ComparisonError: the name is invalid, or the run has no rows.
        RowsError: the file cannot be written.
    """
    if not rows:
        raise ComparisonError(f"no rows to keep as baseline {name!r}")
    path = place(name, machine)
    save_jsonl(rows, path)
    return path


def as_run(name: str, stored: StoredRows) -> Run:
    """Return the rows of a file as a `Run`.

    Raises:
        ComparisonError: the file has no rows.
    """
    if not stored.rows:
        raise ComparisonError(f"{name} holds no rows: write it with `replay --json`")
    return Run(name, stored.rows, stored.is_cut_off)


def machine_of(rows: Sequence[Row]) -> Machine:
    """Return the machine that most of the measured rows name."""
    machines = [row.machine for row in rows if row.machine.device]
    return max(machines, key=machines.count) if machines else Machine()


def _others(machine: Machine) -> str:
    """Describe the baselines for this type of machine and for others."""
    own_directory = directory() / machine_type(machine)
    own = sorted(path.stem for path in own_directory.glob(f"*{SUFFIX}"))
    others = sorted(
        f"{path.stem} ({path.parent.name})"
        for path in directory().glob(f"*/*{SUFFIX}")
        if path.parent != own_directory
    )
    described = [
        f"{whose} machine has {', '.join(names)}"
        for whose, names in (("this type of", own), ("another type of", others))
        if names
    ]
    return " and ".join(described) or "keep one with --save-baseline"
