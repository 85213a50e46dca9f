"""The type that every builder in this package returns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the package must be importable without importing torch
    from torch import nn

    from .language import Language
    from .outputs import Outputs


@dataclass
class Runnable:
    """A model in eval mode, and one full inference through it.

    Attributes:
        name: The model as the user gave it.
        roots: The modules to watch, by name: ``{"transformer": …, "text_encoder": …, "vae": …}``
            for a pipeline, ``{"": model}`` for a single model.
        run: Runs one full inference without gradients, the same on every call: noise is redrawn
            from the seed and the key/value cache starts empty. Returns the pipeline's own result:
            diffusers' output object (``frames`` or ``images``, and the last ``latents``), or
            transformers' generation output (``sequences``, and ``logits`` of each new token).
        outputs: Converts the result of ``run`` to named tensors on the CPU.
        weights: Where the weights come from, for people and manifests.
        settings: What was run, as plain JSON; recordings keep it to build the model again.
        note: One sentence to know before trusting its outputs; empty if there is none.
        language: Scores and decodes text, if this is a language model that supports it.
    """

    name: str
    roots: dict[str, nn.Module]
    run: Callable[[], Any]
    outputs: Callable[[Any], Outputs]
    weights: str
    settings: dict[str, Any]
    note: str = ""
    language: Language | None = None
