"""Source code that calls one kernel on the tensors of one recorded call.

Functions of users and installed packages, and PyTorch's own SDPA, are called directly. For every
other kernel the source calls our adapter, whose files the reproducer copies next to the script.

A child process generates the source (`replay.workers.process`), in the kernel's own environment.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import pkgutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from capture.call.strides import narrow_expanded
from replay.bench.forms import Forms
from replay.isolation.inputs import aliases
from replay.kernels.declared_arguments import passed
from replay.kernels.kernel_names import ENTRY_POINTS, function_of
from replay.kernels.registry import Kernel, find, registered
from replay.workers.worker import Hear, Say
from replay.workloads.sources import source_from_json

ADAPTERS = "replay.kernels.adapters"


@dataclass(frozen=True)
class KernelCall:
    """Source code of one call of a kernel, as JSON."""

    lines: list[str]
    """Body of a function whose arguments are the call's tensors and `stored`, a mapping of further
    tensors by name."""
    imports: list[str] = field(default_factory=list)
    library: str = ""
    """Package that contains the kernel, other than torch and triton."""
    adapter: str = ""
    """Module of our adapter, if the source calls the adapter."""


def handle(request: dict[str, Any], say: Say, _hear: Hear) -> None:
    """Reply to `{"kernel": …, "workload": …, "device": …, "stored": …}` with a `KernelCall`.

    The file `stored` receives the other tensors: further arguments, and the keys that a sparse
    kernel chose.
    """
    name, device = request["kernel"], torch.device(request["device"])
    say(at=name)
    function = _function_of(name)
    # No adapter was imported before, so the first one to register the name contains the kernel.
    adapter = "" if function else _adapter_of(name)
    kernel = find(name).loaded()
    call = source_from_json(request["workload"]).load(device)
    form = Forms.of(call).form(kernel, device).call
    stored: dict[str, Tensor] = {}
    recorded = call.tensors()
    arguments, given = [], aliases(form)
    positions, named = passed(kernel.attention, given) if function else ([], given)
    for prefix, value in [("", each) for each in positions] + [
        (f"{argument}=", each) for argument, each in named.items()
    ]:
        if not isinstance(value, Tensor):
            arguments.append(f"{prefix}{value!r}")
            continue
        name = next(name for name, each in given.items() if each is value)
        if name not in recorded:
            stored[name] = value.cpu().contiguous()
        arguments.append(f"{prefix}{name}" if name in recorded else f'{prefix}stored["{name}"]')
    if kernel.chosen is not None:
        with torch.no_grad():
            chosen = kernel.chosen(form).cpu()
        stored["chosen"] = narrow_expanded(chosen).contiguous()
        stored["chosen_sizes"] = torch.tensor(chosen.shape)  # files keep no expanded dimensions
    save_file(stored, request["stored"])
    say(call=asdict(_source(kernel, function, adapter, arguments)))


def _source(kernel: Kernel, function: str, adapter: str, arguments: list[str]) -> KernelCall:
    from replay.kernels.adapters.torch_sdpa import BACKENDS

    library = "" if kernel.library in ("torch", "triton") else kernel.library
    given = [*(f"    {argument}," for argument in arguments), ")"]
    if function:
        module, _, attribute = function.partition(":")
        imports = [f"module = importlib.import_module({module!r})"]
        return KernelCall([f"return module.{attribute}(", *given], imports, library)
    if kernel.name not in BACKENDS:
        imports = [f"import {adapter}", "from replay.kernels.registry import find"]
        lines = [f"return find({kernel.name!r}).attention(", *given]
        return KernelCall(lines, imports, library, adapter)
    lines = ["return torch.nn.functional.scaled_dot_product_attention(", *given]
    if (backend := BACKENDS[kernel.name]) is not None:
        only = f"with torch.nn.attention.sdpa_kernel(torch.nn.attention.{backend}):"
        lines = [only, *(f"    {line}" for line in lines)]
    return KernelCall(lines)


def _function_of(kernel: str) -> str:
    """Return `module:function` of a user's or an installed package's kernel; empty for others."""
    path, _, function = kernel.rpartition(":")
    if path.endswith(".py"):
        return f"{Path(path).stem}:{function_of(path, function)}"
    for entry_point in importlib.metadata.entry_points(group=ENTRY_POINTS):
        if entry_point.name == kernel:
            return entry_point.value
    return ""


def _adapter_of(name: str) -> str:
    """Return our adapter module that registers a kernel; empty if there is none."""
    package = importlib.import_module(ADAPTERS)
    for module in pkgutil.iter_modules(package.__path__, f"{ADAPTERS}."):
        importlib.import_module(module.name)
        if name.partition("[")[0] in registered():
            return module.name
    return ""
