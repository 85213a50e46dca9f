"""Runs the foreign models without `capture`, and records their attention calls independently.

`python -m tests.capture.foreign.independent DIRECTORY [NAME ...]` writes a file for each model,
with the inputs and output of every call, and the operator's count from PyTorch's profiler.

`F.scaled_dot_product_attention` and FlexAttention are replaced before other modules import them.
The eager attention of transformers' models is a function in each model's module.
"""

import functools
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.attention.flex_attention as flex
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

torch.set_num_threads(1)

Note = dict[str, Any]
notes: list[Note] = []


def noting(
    function: Callable[..., Any], entry_point: str, names: tuple[str, ...]
) -> Callable[..., Any]:
    """Wrap `function` to record its arguments, named by `names`, and its output."""

    @functools.wraps(function)
    def note(*args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        tensors = [given[name] for name in ("query", "key", "value")]
        noted = {
            "entry_point": entry_point,
            "sizes": [list(tensor.shape) for tensor in tensors],
            "strides": [list(tensor.stride()) for tensor in tensors],
            "tensors": [tensor.detach().clone() for tensor in tensors],
        }
        result = function(*args, **kwargs)
        output = result[0].transpose(1, 2) if isinstance(result, tuple) else result
        notes.append({**noted, "output": output.detach().clone()})
        return result

    return note


def note_everything() -> None:
    sdpa = noting(F.scaled_dot_product_attention, "sdpa", ("query", "key", "value"))
    F.scaled_dot_product_attention = sdpa
    flex.flex_attention = noting(flex.flex_attention, "flex", ("query", "key", "value"))


def note_eager() -> None:
    """Replace the eager attention of transformers' models that are already loaded."""
    names = ("module", "query", "key", "value")
    for path, module in list(sys.modules.items()):
        function = vars(module).get("eager_attention_forward")
        is_model = path.startswith("transformers.models.") and callable(function)
        if is_model and not hasattr(function, "__wrapped__"):
            module.eager_attention_forward = noting(function, "eager", names)


def main(directory: Path, wanted: list[str]) -> None:
    note_everything()
    from tests.capture.foreign.table import MODELS

    for name in wanted or MODELS:
        found: dict[str, Any] = {}
        try:
            _, run = MODELS[name].build()
            note_eager()
            notes.clear()
            with torch.no_grad(), profile(activities=[ProfilerActivity.CPU]) as profiled:
                run()
            operator = "aten::scaled_dot_product_attention"
            events = [event for event in profiled.events() if event.name == operator]
            found = {"operator": len(events), "notes": list(notes)}
        except Exception:
            found = {"error": traceback.format_exc()}
        torch.save(found, directory / f"{list(MODELS).index(name)}.pt")
    assert "capture" not in sys.modules


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
