"""Builds a user's own checkpoint: any directory that diffusers or transformers can read."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from diffusers import DiffusionPipeline
from transformers import (
    AutoConfig,
    AutoModel,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from .call_arguments import refuse
from .diffusion import pipeline_runnable, read_pipeline
from .errors import ModelError
from .generation import (
    generation_runnable,
    prompt_ids,
    read_language_model,
    reader_of_prompts,
)
from .hub import read_checkpoint
from .inference import repeatable
from .outputs import of_anything
from .request import Request
from .runnable import Runnable

PROMPT = "A red panda reads a newspaper by the sea."
PROMPT_TOKENS = 512
DENOISING_STEPS = 20
NEW_TOKENS = 32
TOKENIZER_FILES = ("tokenizer_config.json", "tokenizer.json", "vocab.txt", "spiece.model")


def build(request: Request) -> Runnable:
    """Build the pipeline or model in the directory ``request.name``."""
    directory = Path(request.name)
    if (directory / "model_index.json").is_file():
        return _pipeline(request)
    if (directory / "config.json").is_file():
        return _transformer(request)
    raise ModelError(
        f"{directory} contains neither model_index.json (a diffusers pipeline) nor config.json "
        "(a transformers model): give a directory written by save_pretrained"
    )


def _pipeline(request: Request) -> Runnable:
    pipeline = read_pipeline(DiffusionPipeline, request.name, request.dtype)
    parameters = inspect.signature(pipeline.__call__).parameters
    if "prompt" not in parameters or _required(parameters) - {"prompt", *request.arguments}:
        needs = ", ".join(sorted(_required(parameters))) or "no prompt"
        raise ModelError(
            f"{request.name} is a {type(pipeline).__name__}, which takes {needs} instead of just a "
            "prompt: call it in your own function and give FILE.py:FUNCTION"
        )
    prompt = PROMPT if request.prompt is None else request.prompt
    steps = request.steps or DENOISING_STEPS
    arguments: dict[str, Any] = {"prompt": prompt}
    if "num_inference_steps" in parameters:
        arguments["num_inference_steps"] = steps
    elif request.steps is not None:
        raise ModelError(
            f"{request.name} is a {type(pipeline).__name__}, which takes no number of steps: leave "
            "out --steps"
        )
    # CogVideoX has a fixed text length in the transformer, which the pipeline's default ignores.
    transformer = pipeline.components.get("transformer")
    text_tokens = getattr(getattr(transformer, "config", None), "max_text_seq_length", None)
    if text_tokens is not None and "max_sequence_length" in parameters:
        arguments["max_sequence_length"] = text_tokens
    # The output is tensors rather than pictures, so that two runs can be compared exactly.
    if "output_type" in parameters and parameters["output_type"].default in ("pil", "np"):
        arguments["output_type"] = "pt"
    return pipeline_runnable(
        pipeline,
        request,
        arguments=arguments,
        weights=f"pretrained: {request.name}",
        settings=request.settings(prompt=prompt, steps=arguments.get("num_inference_steps")),
    )


def _required(parameters: Any) -> set[str]:
    return {
        name
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }


def _transformer(request: Request) -> Runnable:
    config = read_checkpoint(AutoConfig.from_pretrained, request.name)
    architecture = (config.architectures or [""])[0]
    model_class = getattr(transformers, architecture, AutoModel)
    model = read_language_model(model_class, request.name, request.dtype)
    if model.main_input_name != "input_ids":
        raise ModelError(
            f"{request.name} is a {type(model).__name__}, which reads {model.main_input_name} "
            "instead of text: call it in your own function and give FILE.py:FUNCTION"
        )
    steps = (request.steps or NEW_TOKENS) if model.can_generate() else 0
    if request.steps is not None and not steps:
        raise ModelError(
            f"{request.name} is a {type(model).__name__}, which decodes no tokens: leave out "
            "--steps"
        )
    tokenizer = _tokenizer(request)
    text_config = config.get_text_config()
    positions = getattr(text_config, "max_position_embeddings", None) or PROMPT_TOKENS + steps
    input_ids, prompt = prompt_ids(
        tokenizer,
        request,
        tokens=max(1, min(PROMPT_TOKENS, positions - steps)),
        vocabulary=text_config.vocab_size,
    )
    weights = f"pretrained: {request.name}"
    if steps:
        return generation_runnable(
            model,
            request,
            input_ids=input_ids,
            prompt=prompt,
            steps=steps,
            weights=weights,
            tokenizer=tokenizer,
        )
    return _forward_runnable(
        model,
        request,
        input_ids=input_ids,
        prompt=prompt,
        weights=weights,
        tokenizer=tokenizer,
    )


def _tokenizer(request: Request) -> PreTrainedTokenizerBase | None:
    if any((Path(request.name) / name).is_file() for name in TOKENIZER_FILES):
        return read_checkpoint(AutoTokenizer.from_pretrained, request.name)
    if request.prompt is not None:
        raise ModelError(
            f"{request.name} has no tokenizer for --prompt: leave it out to run on random token "
            "ids, or save the tokenizer into the directory"
        )
    return None


def _forward_runnable(
    model: PreTrainedModel,
    request: Request,
    *,
    input_ids: torch.Tensor,
    prompt: str,
    weights: str,
    tokenizer: PreTrainedTokenizerBase | None,
) -> Runnable:
    """Build a runnable of one forward pass of a model that generates no text, e.g. an encoder."""
    refuse(request.arguments, request.name)
    model.to(request.device).eval()

    def inference(ids: torch.Tensor) -> Callable[[], Any]:
        inputs = {"input_ids": ids.to(request.device)}
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        if model.config.is_encoder_decoder:
            inputs["decoder_input_ids"] = inputs["input_ids"]
        return repeatable(lambda: model(**inputs), seed=request.seed, device=request.device)

    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return Runnable(
        name=request.name,
        roots={"": model},
        run=inference(input_ids),
        outputs=of_anything,
        weights=weights,
        settings=request.settings(prompt=prompt, prompt_tokens=input_ids.shape[1], output="states"),
        for_prompt=reader_of_prompts(tokenizer, request, inference, most=positions),
        extent={"prompt_tokens": input_ids.shape[1]},
    )
