"""The GPUs of this host that calls are spread over, and what is kept apart for each."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from attention_replay import Error
from replay.timing.machine import core_siblings


class DeviceError(Error):
    """Devices that cannot be used as asked; the message names the remedy."""


@dataclass(frozen=True)
class Device:
    """One device, of which its processes see no other."""

    name: str
    """For people, e.g. `GPU 1`; no other has it."""
    kind: str
    """What it is, e.g. `NVIDIA H200`."""
    uuid: str = ""
    variables: dict[str, str] = field(default_factory=dict)
    """Of the environment of its processes."""
    cpus: frozenset[int] = frozenset()
    """Logical CPUs of its processes alone; empty to share all."""
    host: str = ""
    """The node of a cluster that it is in; empty for this machine."""

    def __str__(self) -> str:
        """`GPU 1 (GPU-5f…)`: what a row says of where it ran."""
        return f"{self.name} ({self.uuid})" if self.uuid else self.name


def gpus(asked: str) -> list[Device]:
    """The GPUs that `--gpus` names, each with processor cores of its own.

    Args:
        asked: `all`, or indices as PyTorch counts, with commas between them.

    Raises:
        DeviceError: they are not there, or not alike.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        raise DeviceError(f"--gpus {asked}: PyTorch finds no GPU here, leave it out")
    indices = list(range(count)) if asked == "all" else _indices(asked, count)
    # As the processes of this one count them, where it sees only some.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
    found = []
    for index in indices:
        properties = torch.cuda.get_device_properties(index)
        uuid = getattr(properties, "uuid", "")  # not in every build of PyTorch
        variables = {"CUDA_VISIBLE_DEVICES": visible.split(",")[index].strip()}
        name = f"GPU {index}"
        found.append(Device(name, properties.name, f"GPU-{uuid}" if uuid else "", variables))
    kinds = {device.kind for device in found}
    if len(kinds) > 1:
        raise DeviceError(
            f"--gpus {asked}: {', '.join(sorted(kinds))} are not compared in one replay, name "
            "GPUs of one type"
        )
    return with_own_cores(found)


def _indices(asked: str, count: int) -> list[int]:
    indices: list[int] = []
    for part in (part.strip() for part in asked.split(",")):
        if not re.fullmatch("[0-9]{1,4}", part):
            raise DeviceError(
                f"--gpus {asked}: {part!r} is no number, write all, or numbers like 0,1"
            )
        index = int(part)
        if index >= count:
            last = f" to {count - 1}" if count > 1 else ""
            raise DeviceError(f"--gpus {asked}: there is no GPU {index} here, only 0{last}")
        if index in indices:
            raise DeviceError(f"--gpus {asked}: GPU {index} is named twice")
        indices.append(index)
    return indices


def with_own_cores(devices: Sequence[Device]) -> list[Device]:
    """Share this process's cores out, so that what compiles for one disturbs none of the others.

    Neighbouring cores go together, as they share caches and memory, and so do the hardware threads
    of a core. Where the system does not let processes be bound to cores nothing is shared out.

    Raises:
        DeviceError: there are fewer cores than devices.
    """
    if not hasattr(os, "sched_setaffinity") or len(devices) < 2:
        return list(devices)
    cores = core_siblings(os.sched_getaffinity(0))
    if len(cores) < len(devices):
        raise DeviceError(
            f"{len(devices)} GPUs need a processor core each, and there are {len(cores)}: use "
            "fewer GPUs"
        )
    ends = [len(cores) * number // len(devices) for number in range(len(devices) + 1)]
    shares = [cores[begin:end] for begin, end in itertools.pairwise(ends)]
    return [
        replace(device, cpus=frozenset().union(*share))
        for device, share in zip(devices, shares, strict=True)
    ]


@contextlib.contextmanager
def held(devices: Sequence[Device]) -> Iterator[None]:
    """Keep other replays on this host from taking the same devices; a process that dies lets go.

    Raises:
        DeviceError: one of them is taken.
    """
    try:
        import fcntl
    except ImportError:  # not a Unix
        yield
        return
    with contextlib.ExitStack() as opened:
        for device in devices:
            if not device.uuid:
                continue
            path = Path(tempfile.gettempdir()) / f"attention-replay-{device.uuid}.lock"
            try:
                descriptor = _lock_file(path)
            except OSError as error:
                raise DeviceError(f"cannot lock {device.name}: {path}: {error.strerror}") from error
            opened.callback(os.close, descriptor)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise DeviceError(
                    f"another replay is measuring on {device.name}: wait for it, or name another"
                ) from error
        yield


@contextlib.contextmanager
def held_if_free(device: torch.device) -> Iterator[str]:
    """Keep `held` from a device, unless another replay has it; yields a sentence that says so.

    It is empty where nobody has it, and on a CPU.
    """
    with contextlib.ExitStack() as stack:
        trouble = ""
        if device.type == "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
            try:
                stack.enter_context(held(gpus(str(index))))
            except DeviceError as error:
                trouble = str(error)
        yield trouble


def _lock_file(path: Path) -> int:
    """Open a file that every user's replay can lock; no link is followed."""
    flags = os.O_RDWR | os.O_NOFOLLOW
    try:
        # Without O_CREAT, which Linux refuses on a file of another user in /tmp.
        return os.open(path, flags)
    except FileNotFoundError:
        descriptor = os.open(path, flags | os.O_CREAT, 0o666)
        os.fchmod(descriptor, 0o666)  # whatever the umask
        return descriptor
