"""Ways to run a kernel besides eager mode. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from attention_replay.errors import Error

Mode = Literal["eager", "graph", "compile"]
"""`eager`: called directly; `graph`: captured in a CUDA graph, which is replayed; `compile`: in a
function that `torch.compile` compiles."""

MODES: tuple[Mode, ...] = ("graph", "compile")
"""Modes besides eager mode, in the order of their examination."""

WHERE: dict[Mode, str] = {
    "eager": "",
    "graph": "in a CUDA graph",
    "compile": "in compiled code",
}
"""Modes in words; empty for eager mode."""


class ModeError(Error):
    """Reason why kernels cannot run in a mode."""


def chosen_modes(
    given: str | Sequence[str] | None, *, has_gpu: bool, in_process: bool
) -> tuple[Mode, ...]:
    """Return the modes to try besides eager mode, in the order of `MODES`.

    Args:
        given: names as a list or comma-separated; None for no mode besides eager mode.
        has_gpu: True if the kernels run on a GPU.
        in_process: True if the kernels run without workers.

    Raises:
        ModeError: a mode is unknown or cannot be used here.
    """
    names = given.split(",") if isinstance(given, str) else list(given or ())
    names = [name.strip() for name in names]
    for name in names:
        if name not in MODES:
            raise ModeError(f"no mode {name!r}: choose from {', '.join(MODES)}")
    if "graph" in names and not has_gpu:
        raise ModeError("CUDA graphs need a GPU: leave out graph, or run on a machine with one")
    if "graph" in names and in_process:
        # PyTorch cannot be used after a failed capture.
        raise ModeError("CUDA graphs need worker processes: leave out graph, or use workers")
    return tuple(mode for mode in MODES if mode in names)
