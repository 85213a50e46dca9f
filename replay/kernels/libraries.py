"""Libraries of kernels, tested on a device and imported when first needed.

Nothing in this directory imports a kernel library at module level: the libraries take seconds to
import, conflict with one another, and fail in many ways if they were built for another PyTorch.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import os
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

Capability = tuple[int, int]
"""Compute capability of a GPU, such as (9, 0) for an H200."""


@dataclass(frozen=True)
class Library:
    """Requirements of a kernel on its library: module, version, and supported GPUs."""

    module: str
    """Module to import, such as `flash_attn.cute`."""
    package: str
    """Name of the installed package, such as `flash-attn-4`."""
    install: str
    """Command that installs the package."""
    functions: tuple[str, ...] = ()
    """Functions of the module that the kernel calls."""
    series: int | None = None
    """Major version that this kernel is written for; None for any version."""
    runs_on: Callable[[Capability], bool] = lambda capability: capability >= (8, 0)
    """Function that returns True if a GPU of a compute capability can run the library."""
    needs: str = "8.0 or higher"
    """Description of `runs_on`."""

    def load(self) -> ModuleType:
        """Return the imported module.

        Raises:
            ImportError: the library is unavailable; the message is the reason from `unavailable`.
        """
        found = _import(self.module)
        if isinstance(found, str):
            raise ImportError(self._import_failure(found))
        return found

    def unavailable(self, device: torch.device) -> str | None:
        """Return why the library cannot be used on a device; the hardest problem comes first."""
        if reason := self.wrong_device(device):
            return reason
        installed = version(self.package)
        if self.series is not None and installed and _first_number(installed) != self.series:
            return (
                f"version {installed} is installed, this kernel is {self.series}.x: {self.install}"
            )
        found = _import(self.module)
        if isinstance(found, str):
            return self._import_failure(found)
        missing = [name for name in self.functions if not hasattr(found, name)]
        if missing and getattr(found, "__file__", "") is None:
            # A directory on the path may belong to another package: flash-attn-4 creates such a
            # directory.
            return self._import_failure("")
        if missing:
            return f"{self.package} {installed or 'as installed'} has no {missing[0]}"
        return None

    def wrong_device(self, device: torch.device) -> str | None:
        """Return the reason why no version of the library can be used on a device."""
        if device.type != "cuda" or not torch.cuda.is_available():
            return "needs a CUDA GPU"
        capability = torch.cuda.get_device_capability(device)
        if self.runs_on(capability):
            return None
        present = ".".join(map(str, capability))
        return f"needs compute capability {self.needs} (this GPU has {present})"

    def _import_failure(self, reason: str) -> str:
        return f"cannot be imported: {reason}" if reason else f"not installed: {self.install}"


def version(package: str) -> str:
    """Return the installed version of a package; empty if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def is_interpreted() -> bool:
    """Return True if Triton's interpreter runs kernels: correctly, but too slowly for timing."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")


class TritonLibrary(Library):
    """Library of our kernels, `attention_kernels`, with the Triton version that they need."""

    def unavailable(self, device: torch.device) -> str | None:
        """Return the reason why the kernels cannot be used on a device.

        On the CPU the kernels run in Triton's interpreter, if TRITON_INTERPRET=1 was set
        beforehand.
        """
        ours = _import(OUR_KERNELS)
        if isinstance(ours, str):
            return self._import_failure(ours)
        if not is_interpreted():
            if device.type != "cuda" or not torch.cuda.is_available():
                also = "" if version(self.package) else f"{self.install} and "
                return f"needs a CUDA GPU, or {also}TRITON_INTERPRET=1 to be checked on the CPU"
            if reason := self.wrong_device(device):
                return reason
        found = _import(self.module)
        if isinstance(found, str):
            installed = version(self.package)
            if found or not installed:
                return self._import_failure(found)
            return (
                f"needs Triton 3.4, which PyTorch 2.8 brings, or newer ({installed} is installed)"
            )
        return None


OUR_KERNELS = "attention_kernels"

TRITON = TritonLibrary(
    # Tensor descriptors can be made on the host since Triton 3.4, which PyTorch 2.8 includes.
    module="triton.tools.tensor_descriptor",
    # Triton's version determines the speed of our kernels.
    package="triton",
    # This also installs Triton for CPU builds of PyTorch; CUDA builds already include Triton.
    install=f"pip install ./{OUR_KERNELS}",
)


@functools.cache
def imported(module: str, name: str) -> Any:
    """Return a member of a module that is imported when first needed."""
    return getattr(importlib.import_module(module), name)


@functools.cache
def _import(name: str) -> ModuleType | str:
    """Return the module, or the first line of the import's error; empty if there is no such module.

    The result is cached, because a failed import takes seconds each time.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            return ""
        return _first_line(error)
    except Exception as error:  # a build for another PyTorch may raise anything
        return _first_line(error)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


def _first_number(installed: str) -> int | None:
    first = installed.partition(".")[0]
    return int(first) if first.isdecimal() else None
