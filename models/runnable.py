"""Result type of every builder in this package."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the package must be importable without importing torch
    from torch import nn

    from .language import Language
    from .outputs import Outputs


@dataclass
class Runnable:
    """A model in eval mode, and one full inference with the model.

    Attributes:
        name: The model's name, directory or function, as the user gave it.
        roots: The modules to watch, by name: ``{"transformer": …, "text_encoder": …, "vae": …}``
            for a pipeline, ``{"": model}`` for a single model.
        run: Function that runs one full inference without gradients. Every call is the same: noise
            is redrawn from the seed, and the key/value cache starts empty. Returns the pipeline's
            own result: diffusers' output object (``frames`` or ``images``, and the last
            ``latents``), or transformers' generation output (``sequences``, and ``logits`` of each
            new token).
        outputs: Function that converts the result of ``run`` to named tensors on the CPU.
        weights: Origin of the weights, for users and manifests.
        settings: Settings of the run as plain JSON; recordings store them to rebuild the model.
        pipeline: The diffusers pipeline, whose scheduler counts the steps; None for other models.
        for_prompt: Function that prepares the same inference on another prompt; None for a model
            that reads no prompt.
        extent: Size of the run, as far as it is known beforehand: ``width`` and ``height`` in
            pixels, ``frames``, denoising ``steps``, ``prompt_tokens`` and ``new_tokens``.
        language: Object that scores and decodes text; None if this is not a language model.
    """

    name: str
    roots: dict[str, nn.Module]
    run: Callable[[], Any]
    outputs: Callable[[Any], Outputs]
    weights: str
    settings: dict[str, Any]
    language: Language | None = None
    pipeline: Any = None
    for_prompt: Callable[[str], Callable[[], Any]] | None = None
    extent: dict[str, int] = field(default_factory=dict)

    @staticmethod
    def new_tokens(result: Any) -> int:
        """Count the tokens in a result of ``run`` that an engine generated; 0 in other results."""
        from .outputs import engine_answers

        return sum(map(len, engine_answers(result)))
