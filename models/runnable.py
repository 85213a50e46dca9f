"""What every builder in this package returns."""

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
    """A model in eval mode, and one whole inference through it.

    Attributes:
        name: The model as the user gave it.
        roots: The modules to watch, by name: ``{"transformer": …, "text_encoder": …, "vae": …}``
            for a pipeline, ``{"": model}`` for a single model.
        sampled: Glob (``fnmatch``) over dotted module paths, the root's name first, of the
            modules that matter most: ``"transformer.*"``, or ``"*"`` for all.
        run: One whole inference without gradients. The same on every call: noise is drawn anew
            from the seed and the key/value cache starts empty. Returns the pipeline's own result:
            diffusers' output object (``frames`` or ``images``, and the last ``latents``), or
            transformers' generation output (``sequences``, and ``logits`` of each new token).
        outputs: Turns what ``run`` returned into named tensors on the CPU.
        weights: Where the weights are from, for people and manifests.
        settings: What was run, as plain JSON.
        note: What to know before believing its outputs, a sentence; empty where there is nothing.
        language: Scores and decodes text, if this is a language model of which we know how.
    """

    name: str
    roots: dict[str, nn.Module]
    sampled: str
    run: Callable[[], Any]
    outputs: Callable[[Any], Outputs]
    weights: str
    settings: dict[str, Any]
    note: str = ""
    language: Language | None = None
