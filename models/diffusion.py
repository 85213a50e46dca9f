"""Loads diffusers pipelines, and builds runnables of them."""

from __future__ import annotations

import inspect
from functools import partial
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline
from diffusers.utils import BaseOutput
from torch import nn
from transformers import PreTrainedTokenizerBase, T5Config, T5EncoderModel

from .errors import ModelError
from .hub import read_checkpoint, refuse_missing
from .inference import repeatable
from .libraries import dtype_keyword
from .outputs import of_pipeline
from .random_weights import redraw
from .request import Request
from .runnable import Runnable


def read_pipeline(
    pipeline_class: type[DiffusionPipeline], source: str, dtype: torch.dtype
) -> DiffusionPipeline:
    """Load a full pipeline from a directory or a hub id.

    Raises:
        ModelError: The pipeline cannot be read, or some of its weights are missing.
    """
    options = {dtype_keyword("diffusers"): dtype}
    pipeline = read_checkpoint(pipeline_class.from_pretrained, source, **options)
    for name, component in pipeline.components.items():
        if isinstance(component, nn.Module):
            # diffusers leaves missing weights on the meta device.
            refuse_missing(
                source, [f"{name}.{key}" for key, p in component.named_parameters() if p.is_meta]
            )
    return pipeline


def read_built_in(
    pipeline_class: type[DiffusionPipeline], directory: Path, request: Request
) -> DiffusionPipeline:
    """Load our own pipeline from ``directory``, with trained or random weights.

    Raises:
        ModelError: The pipeline cannot be read, or some of its weights are missing.
    """
    pipeline = read_pipeline(pipeline_class, str(directory), request.dtype)
    if request.weights == "random":
        modules = [part for part in pipeline.components.values() if isinstance(part, nn.Module)]
        redraw(modules, seed=request.seed)
    return pipeline


def pipeline_runnable(
    pipeline: DiffusionPipeline,
    request: Request,
    *,
    arguments: dict[str, Any],
    weights: str,
    settings: dict[str, Any],
    note: str = "",
) -> Runnable:
    """Build a runnable of ``pipeline(**arguments)``, with noise drawn from the seed.

    The noise comes from a CPU generator, so the noise is the same on every device. If the pipeline
    exposes its latents after each step, the result has the last step's latents as ``latents``.
    """
    pipeline.to(request.device)
    pipeline.set_progress_bar_config(disable=True)
    roots = {
        name: component.eval()
        for name, component in pipeline.components.items()
        if isinstance(component, nn.Module)
    }

    shows_latents = (
        "latents" in getattr(pipeline, "_callback_tensor_inputs", ())
        and "callback_on_step_end" in inspect.signature(pipeline.__call__).parameters
    )

    def infer() -> Any:
        latest: dict[str, torch.Tensor] = {}

        def keep(_pipeline: Any, _step: int, _time: Any, tensors: dict[str, Any]) -> dict[str, Any]:
            latest.update(tensors)
            return {}

        shown = {"callback_on_step_end": keep} if shows_latents else {}
        generator = torch.Generator().manual_seed(request.seed)
        result = pipeline(**arguments, **shown, generator=generator)
        if latest and isinstance(result, BaseOutput):
            result.latents = latest["latents"]
        return result

    return Runnable(
        name=request.name,
        roots=roots,
        run=repeatable(infer, seed=request.seed, device=request.device),
        outputs=partial(of_pipeline, decoded=arguments.get("output_type") != "latent"),
        weights=weights,
        settings=settings,
        note=note,
    )


def tiny_t5(vocabulary: int) -> T5EncoderModel:
    """Build a T5 encoder of width 64, with 2 layers of 2 heads (D = 64)."""
    config = T5Config(
        vocab_size=vocabulary, d_model=64, d_kv=64, d_ff=128, num_layers=2, num_heads=2
    )
    return T5EncoderModel(config)


def embeddings(*shape: int, request: Request, stream: int) -> torch.Tensor:
    """Draw normal noise in place of a text encoder's output; each ``stream`` is different."""
    generator = torch.Generator().manual_seed(request.seed + stream)
    return torch.randn(shape, generator=generator).to(request.device, request.dtype)


def refuse_prompt(request: Request) -> None:
    """Reject a prompt, because random embeddings replace the text encoder that would read it.

    Raises:
        ModelError: A prompt was given.
    """
    if request.prompt is not None:
        raise ModelError(
            "--prompt has no effect with random weights of this size, whose text embeddings are "
            "also random: leave it out, or use --weights pretrained or --size tiny"
        )


def unknown_words(request: Request, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a sentence with the prompt's words that a trained picture model never saw.

    The result is empty if there are none. ``tokenizer`` has a token for each word of the model's
    training (``offline_tokenizers.t5_tokenizer``).
    """
    if request.weights != "pretrained" or request.prompt is None:
        return ""
    words = request.prompt.split()
    spelt = [word for word in words if tokenizer.tokenize(word)[:1] == ["▁"]]
    if not spelt:
        return ""
    unknown = ", ".join(dict.fromkeys(spelt))
    return (
        f"the built-in {request.name} knows only a few words, and none of these: {unknown}; for "
        f"captions that it knows, see models/pretrained/{request.name}/README.md"
    )
