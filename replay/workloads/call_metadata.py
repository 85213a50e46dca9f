"""What is known of a call before its tensors are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from capture.call.shape import Shape
from capture.storage.call_file import FileEntry
from replay.workloads.recorded import Workload

ALIGNMENT = 16
"""Compilers treat sizes that are multiples of it apart."""


class Outline(NamedTuple):
    """A call's sizes, and where a model made it."""

    form: tuple[object, ...]
    """Alike for calls that most kernels need not be compiled for again: lengths count by their
    binary order of magnitude, and by whether they are aligned."""
    shape: Shape | None = None
    """None where only the tensors tell."""
    is_causal: bool = False
    model: str = ""
    phase: str = ""
    module: str = ""


def outline(workload: Workload) -> Outline:
    """The outline of a recorded call, joined or not, of its twins, or of a random one."""
    return _of_source(workload.source) or Outline((workload.name,))


def _of_source(source: dict[str, Any]) -> Outline | None:
    kind = source.get("kind")
    if kind == "twin":
        return _of_source(source["of"])
    if kind == "synthetic":
        spec = source["spec"]
        shape = Shape(*(spec[name] for name in Shape._fields))
        form = (spec["dtype"], spec["is_causal"], spec["mask"], *_classes(shape))
        return Outline(form, shape, spec["is_causal"], source["model"])
    if kind == "joined":
        return _joined(source)
    if kind != "recorded":
        return None
    header = FileEntry.from_json(Path(source["directory"]), source["entry"]).header
    dtypes, beyond = sorted(header.dtypes.items()), sorted(header.variant.arguments().items())
    form = (*dtypes, header.is_causal, header.mask_structure, *beyond, *_classes(header.shape))
    origin = header.origin
    return Outline(form, header.shape, header.is_causal, origin.model, origin.phase, origin.module)


def _joined(source: dict[str, Any]) -> Outline | None:
    """Its parts are alike: together so many times the work of one, whichever way it was shared."""
    entries = source["entries"]
    part = _of_source({**source, "kind": "recorded", "entry": entries[0]})
    if part is None or part.shape is None:
        return part
    shape = part.shape._replace(q_heads=part.shape.q_heads * len(entries))
    return part._replace(form=(*part.form, len(entries)), shape=shape)


def _classes(shape: Shape) -> tuple[object, ...]:
    lengths = shape.q_len, shape.kv_len
    classes = [(length.bit_length(), length % ALIGNMENT == 0) for length in lengths]
    return (*shape._replace(q_len=0, kv_len=0), *classes)
