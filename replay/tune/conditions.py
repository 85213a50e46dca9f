"""Conditions of a tuning, whose change makes another plan the fastest one within a budget."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from replay.kernels.libraries import version
from replay.kernels.own_files import own_files
from replay.kernels.registry import Kernel, select
from replay.plan.plan_device import types_at_hand
from replay.timing.machine import describe, usual_device

ADDRESS = re.compile(" at 0x[0-9a-f]+")
"""Place in memory, which differs between processes."""

SAMPLED = 8
"""Number of values of each weight that distinguish one checkpoint from another."""

VERSIONS = ("torch", "cuda", "cudnn", "triton", "threads")
"""Fields of `replay.rows.row.Machine` that are conditions."""


def conditions(
    roots: Mapping[str, nn.Module],
    census: Mapping[str, Any],
    quality: str,
    kernels: str | None,
    prompts: Sequence[str],
    *,
    is_sparse: bool = False,
) -> dict[str, str]:
    """Return the conditions of a tuning by name, as texts that can be compared.

    Args:
        roots: the model's modules, by name.
        census: census of a run, as `capture.hooks.census.Census.to_json` writes it.
        kernels: comma-separated names and globs of the kernels to choose from; None for the
            default kernels.
        prompts: prompts, or other texts that stand for them.
        is_sparse: True if block-sparse attention could be chosen.

    Raises:
        KernelNameError: a name or glob matches no kernel.
    """
    chosen = select(kernels)[0]
    return {
        "quality budget": quality,
        "choice of kernels": f"{len(chosen)}, {_digest(*sorted(each.name for each in chosen))}"
        + ", and sparse" * is_sparse,
        "judged prompts": f"{len(prompts)}, {_digest(*prompts)}" if prompts else "none",
        **_of_model(roots),
        **_of_calls(census),
        **_of_machine(roots),
        **_versions(roots, chosen),
    }


def changes(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Describe the conditions that differ, such as `torch 2.11.0 → 2.13.0`."""
    return [
        f"{name} {before.get(name, 'none')} → {now.get(name, 'none')}"
        for name in {**before, **now}
        if before.get(name) != now.get(name)
    ]


def digest_of(conditions: Mapping[str, str]) -> str:
    """Return a digest of the conditions."""
    return _digest(*(f"{name}={value}" for name, value in sorted(conditions.items())))


def _of_model(roots: Mapping[str, nn.Module]) -> dict[str, str]:
    found = {}
    for name, root in roots.items():
        title = name or "model"
        weights = list(root.named_parameters())
        found[f"configuration of {title}"] = f"{type(root).__name__} " + _digest(
            json.dumps(_configuration(root), sort_keys=True, default=str),
            # A module that `torch.compile` compiled in place has a compiled call.
            *(
                f"{path} {type(module).__name__} {module._compiled_call_impl is not None}"
                for path, module in root.named_modules()
            ),
            *(f"{path} {tuple(weight.shape)} {weight.dtype}" for path, weight in weights),
        )
        found[f"weights of {title}"] = _digest(*(_sample(weight) for _, weight in weights))
        if states := {_adapter(module) for module in root.modules()} - {""}:
            together = ", ".join(sorted(states))
            found[f"adapters of {title}"] = together if len(states) == 1 else _digest(together)
    return found


def _adapter(layer: Any) -> str:
    """Return the names and scales of the active LoRAs in a layer of peft; empty for others."""
    scales, active = (getattr(layer, name, None) for name in ("scaling", "active_adapters"))
    if not isinstance(scales, dict) or active is None:
        return ""
    active = () if layer.disable_adapters else active
    return ", ".join(f"{name} × {scales.get(name, 1):g}" for name in active) or "off"


def _configuration(root: nn.Module) -> dict[str, Any]:
    """Return the configuration of a model of diffusers or transformers; empty for others."""
    config = getattr(root, "config", {})
    config = config.to_dict() if hasattr(config, "to_dict") else config
    if not isinstance(config, Mapping):
        return {}
    # Names that begin with an underscore say where the model is from, in any order.
    return {name: value for name, value in config.items() if not str(name).startswith("_")}


def _sample(weight: Tensor) -> str:
    """Return a few values of a weight; empty if it is offloaded or its type cannot be indexed.

    A quantised weight may consist of several tensors, and of settings such as its scheme.
    """
    if is_traceable_wrapper_subclass(weight):
        names, settings = weight.__tensor_flatten__()
        parts = (_sample(getattr(weight, name)) for name in names)
        return " ".join((ADDRESS.sub("", repr(settings)), *parts))
    if weight.is_meta or not weight.numel():
        return ""
    try:
        flat = weight.detach().flatten()
        return str(flat[:: -(-len(flat) // SAMPLED)].tolist())
    except (NotImplementedError, RuntimeError):
        return ""


def _of_calls(census: Mapping[str, Any]) -> dict[str, str]:
    """Return number, key lengths and largest batch of the calls, by phase."""
    calls: dict[str, list[tuple[int, int, int]]] = {}
    for row in census["rows"]:
        signature = census["signatures"][row["signature"]]
        sizes = row["calls"], signature["key"][-2], signature["query"][0]
        calls.setdefault(row["phase"], []).append(sizes)
    return {
        f"calls of {phase}": (
            f"{sum(numbers)} on {min(lengths)} to {max(lengths)} keys in batches of {max(batches)}"
        )
        for phase, each in calls.items()
        for numbers, lengths, batches in [zip(*each, strict=True)]
    }


def _of_machine(roots: Mapping[str, nn.Module]) -> dict[str, str]:
    machine = describe(torch.device(usual_device()))
    devices = {weight.device for root in roots.values() for weight in root.parameters()}
    name = ", ".join(types_at_hand(devices)) if torch.cuda.is_available() else machine.device
    fields = {field: getattr(machine, field) for field in VERSIONS}
    return {"device": name, **{field: value for field, value in fields.items() if value}}


def _versions(roots: Mapping[str, nn.Module], kernels: Sequence[Kernel]) -> dict[str, str]:
    """Return the versions of the libraries of the model and of the kernels, and of this one."""
    classes = {type(module) for root in roots.values() for module in root.modules()}
    packages = {each.__module__.partition(".")[0] for each in classes}
    packages |= {kernel.library for kernel in kernels} | {"attention-replay"}
    found = {name: version(name) for name in sorted(packages - {"", *VERSIONS})}
    files = {kernel.source: _content(Path(kernel.source)) for kernel in kernels if kernel.source}
    return {name: text for name, text in {**found, **files}.items() if text}


def _content(source: Path) -> str:
    """Return a digest of a user's file and of those it imports; a package's version."""
    path = source.resolve()
    files = [each.read_bytes().hex() for _, each in own_files(path, path.parent)]
    return _digest(*files) if files else version(str(source))


def _digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:12]
