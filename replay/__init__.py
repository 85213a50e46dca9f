"""Replay recorded attention calls through every kernel: how fast, how accurate, which to run.

from replay import register_kernel, use_kernel

with use_kernel("torch-flash") as swap:
    pipe("a panda playing guitar")
print(swap)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from replay.bench.runner import replay
    from replay.bench.settings import Settings
    from replay.diagnosis.around_run import doctor
    from replay.kernels.chosen_keys import mask_of_tokens
    from replay.kernels.registry import register_kernel, select
    from replay.patch.use_kernel import use_kernel, use_plan
    from replay.report.notebook import Rows, read_rows
    from replay.rows.frames import to_dataframe
    from replay.workloads.recorded import from_directory

__all__ = [
    "Rows",
    "Settings",
    "doctor",
    "from_directory",
    "mask_of_tokens",
    "read_rows",
    "register_kernel",
    "replay",
    "select",
    "to_dataframe",
    "use_kernel",
    "use_plan",
]

_HOMES = {
    "Rows": "replay.report.notebook",
    "Settings": "replay.bench.settings",
    "doctor": "replay.diagnosis.around_run",
    "from_directory": "replay.workloads.recorded",
    "mask_of_tokens": "replay.kernels.chosen_keys",
    "read_rows": "replay.report.notebook",
    "register_kernel": "replay.kernels.registry",
    "replay": "replay.bench.runner",
    "select": "replay.kernels.registry",
    "to_dataframe": "replay.rows.frames",
    "use_kernel": "replay.patch.use_kernel",
    "use_plan": "replay.patch.use_kernel",
}


def __getattr__(name: str) -> Any:
    # On first use: `replay --help` must not wait for torch.
    if name not in _HOMES:
        raise AttributeError(f"module 'replay' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
