"""The processor cores of the machine and of this process. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

TOPOLOGY = Path("/sys/devices/system/cpu")


def physical_cores(topology: Path = TOPOLOGY) -> int | None:
    """Count physical cores, not hardware threads; None if the system does not report them."""
    siblings = set()
    for listed in topology.glob("cpu[0-9]*/topology/thread_siblings_list"):
        try:
            siblings.add(listed.read_text())
        except OSError:  # the core was switched off while this loop ran
            continue
    return len(siblings) or None


def core_siblings(cpus: Iterable[int], topology: Path = TOPOLOGY) -> list[list[int]]:
    """Group logical CPUs by core, with neighbouring cores next to each other.

    If the system does not report cores, each CPU counts as a core.
    """
    cores: dict[str, list[int]] = {}
    for cpu in sorted(cpus):
        try:
            core = (topology / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text()
        except OSError:
            core = f"cpu {cpu}"
        cores.setdefault(core, []).append(cpu)
    return list(cores.values())


def usable_cpus() -> int:
    """Count the logical CPUs that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
