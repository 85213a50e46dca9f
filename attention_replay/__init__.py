"""Record the attention inputs of a real model, replay them, and choose a kernel.

This package contains the full Python interface. Each name is imported on first use:

    import attention_replay as ar

    with ar.record(pipe.transformer, out="captured_inputs", max=10):
        pipe("a panda playing guitar")
    rows = ar.replay("captured_inputs", kernels="torch-*")
    print(rows.best())
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from attention_replay.errors import Error

if TYPE_CHECKING:
    from capture.call.attention_call import AttentionCall
    from capture.recording.record import record
    from capture.recording.recording import Recording
    from capture.sharing.share import share
    from capture.storage.dataset import Dataset, load
    from replay.accuracy.gradient_verdict import judge_gradients
    from replay.api.batch_invariance import agree
    from replay.api.cache_formats import cache_formats
    from replay.api.compare_rows import compare
    from replay.api.diagnose import doctor
    from replay.api.export_plan import export
    from replay.api.foretell_model import foretell
    from replay.api.list_kernels import kernels
    from replay.api.measured_rows import Rows
    from replay.api.plan_model import plan
    from replay.api.replay_calls import replay
    from replay.api.reproduce_failure import reproduce
    from replay.api.run_selftest import selftest
    from replay.api.tune_model import tune
    from replay.api.tuned_model import tuned
    from replay.api.verify_model import verify
    from replay.api.write_report import report
    from replay.kernels.registry import Kernel, register_kernel
    from replay.patch.apply import Applied, apply
    from replay.patch.use_kernel import use_kernel, use_plan
    from replay.plan.plan import Plan
    from replay.rows.row import Row
    from replay.tune.tuning import Tuning

__version__ = "0.1.0"

__all__ = [
    "Applied",
    "AttentionCall",
    "Dataset",
    "Error",
    "Kernel",
    "Plan",
    "Recording",
    "Row",
    "Rows",
    "Tuning",
    "__version__",
    "agree",
    "apply",
    "cache_formats",
    "compare",
    "doctor",
    "export",
    "foretell",
    "judge_gradients",
    "kernels",
    "load",
    "plan",
    "record",
    "register_kernel",
    "replay",
    "report",
    "reproduce",
    "selftest",
    "share",
    "tune",
    "tuned",
    "use_kernel",
    "use_plan",
    "verify",
]

_HOMES = {
    "Applied": "replay.patch.apply",
    "AttentionCall": "capture.call.attention_call",
    "Dataset": "capture.storage.dataset",
    "Kernel": "replay.kernels.registry",
    "Plan": "replay.plan.plan",
    "Recording": "capture.recording.recording",
    "Row": "replay.rows.row",
    "Rows": "replay.api.measured_rows",
    "Tuning": "replay.tune.tuning",
    "agree": "replay.api.batch_invariance",
    "apply": "replay.patch.apply",
    "cache_formats": "replay.api.cache_formats",
    "compare": "replay.api.compare_rows",
    "doctor": "replay.api.diagnose",
    "export": "replay.api.export_plan",
    "foretell": "replay.api.foretell_model",
    "judge_gradients": "replay.accuracy.gradient_verdict",
    "kernels": "replay.api.list_kernels",
    "load": "capture.storage.dataset",
    "plan": "replay.api.plan_model",
    "record": "capture.recording.record",
    "register_kernel": "replay.kernels.registry",
    "replay": "replay.api.replay_calls",
    "report": "replay.api.write_report",
    "reproduce": "replay.api.reproduce_failure",
    "selftest": "replay.api.run_selftest",
    "share": "capture.sharing.share",
    "tune": "replay.api.tune_model",
    "tuned": "replay.api.tuned_model",
    "use_kernel": "replay.patch.use_kernel",
    "use_plan": "replay.patch.use_kernel",
    "verify": "replay.api.verify_model",
}
"""Modules of the public names that are imported on first use."""


def __getattr__(name: str) -> Any:
    # Imported on first use, so that `--help` does not wait for torch.
    if name not in _HOMES:
        raise AttributeError(f"module 'attention_replay' has no attribute {name!r}")
    from capture.large_imports import without_collecting

    with without_collecting():
        return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
