"""Loads diffusers pipelines, and builds runnables from them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from diffusers import DiffusionPipeline
from diffusers.utils import BaseOutput
from torch import nn
from transformers import T5Config, T5EncoderModel

from . import pretrained_weights
from .call_arguments import for_call
from .errors import ModelError
from .hub import read_checkpoint, refuse_missing
from .inference import repeatable
from .libraries import dtype_keyword
from .outputs import of_pipeline
from .random_weights import build_random, redraw
from .request import Request
from .runnable import Runnable


def read_pipeline(
    pipeline_class: type[DiffusionPipeline], source: str, dtype: torch.dtype
) -> DiffusionPipeline:
    """Load a full pipeline from a directory or a hub id."""
    options = {dtype_keyword("diffusers"): dtype}
    pipeline = read_checkpoint(pipeline_class.from_pretrained, source, **options)
    for name, component in pipeline.components.items():
        if isinstance(component, nn.Module):
            # diffusers leaves missing weights on the meta device.
            refuse_missing(
                source, [f"{name}.{key}" for key, p in component.named_parameters() if p.is_meta]
            )
    return pipeline


def named_runnable(
    request: Request,
    pipeline_class: type[DiffusionPipeline],
    transformer_class: Any,
    *,
    hub_id: str,
    configuration: Mapping[str, Any],
    scheduler: Any,
    tiny: Callable[[], DiffusionPipeline],
    prompt: str,
    trained_prompt: str,
    embeddings: Callable[[Any], Mapping[str, tuple[int, ...]]],
    run: Callable[[DiffusionPipeline, bool], dict[str, Any]],
    output: str,
) -> Runnable:
    """Build a runnable of a published text-to-picture or text-to-video model.

    The pipeline is our trained one (or its random counterpart), our tiny one, an official or given
    checkpoint, or only a full-size transformer with random weights, which contains the attention.

    Args:
        hub_id: The official checkpoint.
        configuration: Configuration of the official transformer.
        tiny: Builds the tiny pipeline with random weights.
        prompt: Default prompt.
        trained_prompt: Default prompt of our trained weights.
        embeddings: Maps the transformer's configuration to the shapes of the text embeddings, by
            argument of the pipeline.
        run: Maps the pipeline, and True if it is our trained one, to its other arguments.
        output: Name of a decoded output.
    """
    trained = pretrained_weights.directory(request.name) if request.is_built_in else None
    if request.prompt is not None:
        prompt = request.prompt
    elif trained:
        prompt = trained_prompt
    texts: dict[str, Any] = {"prompt": prompt}
    if trained:
        pipeline = read_pipeline(pipeline_class, str(trained), request.dtype)
        if request.weights == "random":
            parts = pipeline.components.values()
            redraw([part for part in parts if isinstance(part, nn.Module)], seed=request.seed)
        weights = pretrained_weights.describe(request.name, request.weights, request.seed)
    elif request.is_built_in:
        pipeline = tiny()
        weights = f"random, seed {request.seed} (built-in tiny configuration)"
    elif request.weights == "pretrained":
        source = request.checkpoint or hub_id
        pipeline = read_pipeline(pipeline_class, source, request.dtype)
        weights = f"pretrained: {source}"
    else:
        if request.prompt is not None:
            raise ModelError(
                "--prompt has no effect with random weights of this size, whose text embeddings "
                "are also random: leave it out, or use --weights pretrained or --size tiny"
            )
        if request.checkpoint:
            configuration = read_checkpoint(
                transformer_class.load_config, request.checkpoint, subfolder="transformer"
            )
        transformer = build_random(
            lambda: transformer_class.from_config(configuration),
            seed=request.seed,
            dtype=request.dtype,
            device=request.device,
        )
        absent = dict.fromkeys(inspect.signature(pipeline_class).parameters)
        pipeline = pipeline_class(**{**absent, "transformer": transformer, "scheduler": scheduler})
        texts = {
            name: _noise(shape, request, stream)
            for stream, (name, shape) in enumerate(embeddings(transformer.config).items(), 1)
        }
        prompt = "random text embeddings"
        origin = request.checkpoint or hub_id.partition("/")[2]
        weights = f"random, seed {request.seed} ({origin} configuration)"
    decodes = pipeline.vae is not None
    arguments = run(pipeline, trained is not None)
    names = {"num_inference_steps": "steps", "max_sequence_length": "text_tokens"}
    return pipeline_runnable(
        pipeline,
        request,
        arguments={**texts, **arguments, "output_type": "pt" if decodes else "latent"},
        weights=weights,
        settings=request.settings(
            prompt=prompt,
            **{names.get(name, name): value for name, value in arguments.items()},
            output=output if decodes else "latents: the VAE is left out",
        ),
    )


def pipeline_runnable(
    pipeline: DiffusionPipeline,
    request: Request,
    *,
    arguments: dict[str, Any],
    weights: str,
    settings: dict[str, Any],
) -> Runnable:
    """Build a runnable of ``pipeline(**arguments)``, with noise drawn from the seed.

    The noise comes from a CPU generator, so the noise is the same on every device. If the pipeline
    exposes its latents after each step, the result has the last step's latents as ``latents``.
    Arguments of the request replace those given here.
    """
    arguments = arguments | for_call(request.arguments, pipeline.__call__, request.name)
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

    def inference(**texts: str) -> Callable[[], Any]:
        def infer() -> Any:
            latest: dict[str, torch.Tensor] = {}

            def keep(
                _pipeline: Any, _step: int, _time: Any, tensors: dict[str, Any]
            ) -> dict[str, Any]:
                latest.update(tensors)
                return {}

            shown = {"callback_on_step_end": keep} if shows_latents else {}
            generator = torch.Generator().manual_seed(request.seed)
            result = pipeline(**arguments | texts, **shown, generator=generator)
            if latest and isinstance(result, BaseOutput):
                result.latents = latest["latents"]
            return result

        return repeatable(infer, seed=request.seed, device=request.device)

    return Runnable(
        name=request.name,
        roots=roots,
        run=inference(),
        outputs=partial(of_pipeline, decoded=arguments.get("output_type") != "latent"),
        weights=weights,
        settings=settings,
        pipeline=pipeline,
        for_prompt=(lambda text: inference(prompt=text)) if "prompt" in arguments else None,
        extent=_extent(pipeline, arguments),
    )


def _extent(pipeline: DiffusionPipeline, arguments: Mapping[str, Any]) -> dict[str, int]:
    """Return the size of ``pipeline(**arguments)``, without sizes that only the call determines."""
    parameters = inspect.signature(pipeline.__call__).parameters
    given = {name: parameter.default for name, parameter in parameters.items()} | dict(arguments)
    names = {"num_frames": "frames", "num_inference_steps": "steps"}
    sizes = {name: given.get(name) for name in ("width", "height", *names)}
    return {names.get(name, name): size for name, size in sizes.items() if isinstance(size, int)}


def tiny_t5(vocabulary: int) -> T5EncoderModel:
    """Build a T5 encoder of width 64, with 2 layers of 2 heads (D = 64)."""
    config = T5Config(
        vocab_size=vocabulary, d_model=64, d_kv=64, d_ff=128, num_layers=2, num_heads=2
    )
    return T5EncoderModel(config)


def _noise(shape: tuple[int, ...], request: Request, stream: int) -> torch.Tensor:
    """Draw normal noise in place of a text encoder's output; each ``stream`` is different."""
    generator = torch.Generator().manual_seed(request.seed + stream)
    return torch.randn(shape, generator=generator).to(request.device, request.dtype)
