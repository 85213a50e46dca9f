"""Table of every foreign model; `python -m tests.capture.foreign.table` prints it for the docs."""

from tests.capture.foreign import denoisers, text, vision_and_audio
from tests.capture.foreign.model import Foreign

MODELS: dict[str, Foreign] = {
    model.name: model for model in (*text.MODELS, *vision_and_audio.MODELS, *denoisers.MODELS)
}


def markdown() -> str:
    """Return a table of all models by entry point, with the number of calls in their runs."""
    lines = ["| attention of the model | calls | models |", "|---|---:|---|"]
    known = {entry_points(model): list[Foreign]() for model in MODELS.values()}
    for model in MODELS.values():
        known[entry_points(model)].append(model)
    for taken, models in known.items():
        calls = sum(model.calls.total() for model in models)
        lines.append(f"| {taken} | {calls} | {', '.join(model.name for model in models)} |")
    return "\n".join(lines) + "\n"


ENTRY_POINTS = {
    "sdpa": "SDPA",
    "transformers": "transformers' registry (`eager`)",
    "diffusers": "diffusers' dispatcher",
}


def entry_points(model: Foreign) -> str:
    """Return the names of the entry points that a model calls."""
    taken = [
        name
        for entry_point, name in ENTRY_POINTS.items()
        if entry_point in model.entry_points and model.calls
    ]
    unseen = [f"the model's own code ({'counted' if model.calls else 'counted, nothing recorded'})"]
    return ", ".join(taken + (unseen if model.unseen else [])) or "none"


if __name__ == "__main__":
    print(markdown(), end="")
