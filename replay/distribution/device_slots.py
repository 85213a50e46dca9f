"""The GPUs of this host that run calls, with CPU cores and a lock for each GPU.

This module imports torch late, because workers must start first.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from attention_replay.errors import Error
from replay.timing.cores import core_siblings

if TYPE_CHECKING:
    import torch


class DeviceError(Error):
    """Error for unusable devices; the message names the remedy."""


@dataclass(frozen=True)
class Device:
    """Device whose processes can use no other device."""

    name: str
    """Unique name in messages, such as `GPU 1`."""
    kind: str
    """Type of device, such as `NVIDIA H200`."""
    uuid: str = ""
    variables: dict[str, str] = field(default_factory=dict)
    """Environment variables of the device's processes."""
    cpus: frozenset[int] = frozenset()
    """Logical CPUs of the device's processes; empty to share all CPUs."""
    host: str = ""
    """Node of a cluster that has the device; empty for this machine."""

    def __str__(self) -> str:
        """Format the device as in a row: `GPU 1 (GPU-5f…)`."""
        return f"{self.name} ({self.uuid})" if self.uuid else self.name


def gpus(asked: str) -> list[Device]:
    """Return the GPUs that `--gpus` names, each with separate CPU cores.

    Args:
        asked: `all`, or comma-separated indices in PyTorch's numbering.

    Raises:
        DeviceError: a GPU does not exist, or the GPUs' types differ.
    """
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        raise DeviceError(f"--gpus {asked}: PyTorch finds no GPU here, leave it out")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
    found = []
    for index in _indices(asked, count):
        properties = torch.cuda.get_device_properties(index)
        uuid = getattr(properties, "uuid", "")  # some builds of PyTorch lack UUIDs
        variables = {"CUDA_VISIBLE_DEVICES": visible.split(",")[index].strip()}
        device = Device(f"GPU {index}", properties.name, f"GPU-{uuid}" if uuid else "", variables)
        found.append(device)
    kinds = {device.kind for device in found}
    if len(kinds) > 1:
        raise DeviceError(
            f"--gpus {asked}: {', '.join(sorted(kinds))} are not compared in one replay, name "
            "GPUs of one type"
        )
    return with_own_cores(found)


def _indices(asked: str, count: int) -> list[int]:
    if asked == "all":
        return list(range(count))
    indices: list[int] = []
    for part in (part.strip() for part in asked.split(",")):
        if not re.fullmatch("[0-9]{1,4}", part):
            raise DeviceError(
                f"--gpus {asked}: invalid GPU {part!r}, write all, or numbers like 0,1"
            )
        index = int(part)
        if index in indices:
            raise DeviceError(f"--gpus {asked}: GPU {index} is named twice")
        if index >= count:
            last = f" to {count - 1}" if count > 1 else ""
            raise DeviceError(f"--gpus {asked}: there is no GPU {index} here, only 0{last}")
        indices.append(index)
    return indices


def with_own_cores(devices: Sequence[Device]) -> list[Device]:
    """Divide this process's cores among devices, so that their compilers do not disturb each other.

    Neighbouring cores, which share caches and memory, stay together. The hardware threads of a core
    stay together too. Cores are not divided if the system cannot bind processes to cores.
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
    """Lock devices against other replays on this host; a process that ends releases its locks.

    Raises:
        DeviceError: another replay has locked one of the devices.
    """
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
    """Lock a device if no other replay uses it; yield a sentence if another replay does.

    The sentence is empty for a free device and for a CPU.
    """
    with contextlib.ExitStack() as stack:
        trouble = ""
        if device.type == "cuda":
            import torch

            index = torch.cuda.current_device() if device.index is None else device.index
            try:
                stack.enter_context(held(gpus(str(index))))
            except DeviceError as error:
                trouble = str(error)
        yield trouble


def _lock_file(path: Path) -> int:
    """Open a file that every user's replay can lock, without following links."""
    flags = os.O_RDWR | os.O_NOFOLLOW
    try:
        # Linux refuses O_CREAT for another user's file in /tmp.
        return os.open(path, flags)
    except FileNotFoundError:
        descriptor = os.open(path, flags | os.O_CREAT, 0o666)
        os.fchmod(descriptor, 0o666)  # overrides the umask
        return descriptor
