"""Record the attention calls a model really makes, and load them again.

from capture import record, load

with record(pipe.transformer, out="captured_inputs", max=10):
    pipe("a panda playing guitar")
for call in load("captured_inputs"):
    print(call.origin.module, call.shape, call.query.stride())
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from capture.call.attention_call import AttentionCall
    from capture.recording.record import record
    from capture.recording.recording import Recording
    from capture.sharing.share import share
    from capture.storage.dataset import Dataset, load

__all__ = ["AttentionCall", "Dataset", "Recording", "load", "record", "share"]

_HOMES = {
    "AttentionCall": "capture.call.attention_call",
    "Dataset": "capture.storage.dataset",
    "Recording": "capture.recording.recording",
    "load": "capture.storage.dataset",
    "record": "capture.recording.record",
    "share": "capture.sharing.share",
}
"""Module of each public name."""


def __getattr__(name: str) -> Any:
    # Imported on first use, so that `capture --help` does not wait for torch.
    if name not in _HOMES:
        raise AttributeError(f"module 'capture' has no attribute {name!r}")
    import importlib

    from capture.large_imports import without_collecting

    with without_collecting():
        return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
