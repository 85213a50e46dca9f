"""Replay recorded attention calls through every kernel, to find the fastest accurate one.

from replay import register_kernel, use_kernel

with use_kernel("torch-flash") as swap:
    pipe("a panda playing guitar")
print(swap)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from replay.api.compare_rows import compare
    from replay.api.diagnose import doctor
    from replay.api.measured_rows import Rows
    from replay.api.replay_calls import replay
    from replay.api.verify_model import verify
    from replay.kernels.chosen_keys import mask_of_tokens
    from replay.kernels.registry import Kernel, register_kernel
    from replay.patch.apply import apply
    from replay.patch.use_kernel import use_kernel, use_plan
    from replay.plan.plan import Plan
    from replay.rows.row import Row

_HOMES = {
    "Kernel": "replay.kernels.registry",
    "Plan": "replay.plan.plan",
    "Row": "replay.rows.row",
    "Rows": "replay.api.measured_rows",
    "apply": "replay.patch.apply",
    "compare": "replay.api.compare_rows",
    "doctor": "replay.api.diagnose",
    "mask_of_tokens": "replay.kernels.chosen_keys",
    "register_kernel": "replay.kernels.registry",
    "replay": "replay.api.replay_calls",
    "use_kernel": "replay.patch.use_kernel",
    "use_plan": "replay.patch.use_kernel",
    "verify": "replay.api.verify_model",
}
"""Module of each public name; no public name may equal that of one of this package's folders."""

__all__ = [
    "Kernel",
    "Plan",
    "Row",
    "Rows",
    "apply",
    "compare",
    "doctor",
    "mask_of_tokens",
    "register_kernel",
    "replay",
    "use_kernel",
    "use_plan",
    "verify",
]


def __getattr__(name: str) -> Any:
    # Import on first use, so that `replay --help` does not wait for torch.
    if name not in _HOMES:
        raise AttributeError(f"module 'replay' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
