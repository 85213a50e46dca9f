"""Llama: prefill and greedy decode.

Llama-2-7b has multi-head attention. Llama-3.1-8B has 4 query heads per key/value head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .. import pretrained_weights
from ..errors import ModelError
from ..libraries import Library, Version
from ..runnable import Runnable

if TYPE_CHECKING:
    from transformers import LlamaConfig, LlamaForCausalLM

    from ..request import Request

NAMES = {
    "llama": "Llama-2-7b, prefill and greedy decode (transformers)",
    "llama-3.1-8b": "Llama-3.1-8B, grouped-query attention, prefill and greedy decode "
    "(transformers)",
}
NEEDS: dict[Library, Version] = {
    "transformers": (5, 0),  # reads the tokenizers that ship with this package
}

BUILT_IN_PROMPT_TOKENS = 1024
TINY_PROMPT_TOKENS = 384
TINY_STEPS = 8
FULL_STEPS = 64


@dataclass(frozen=True)
class Variant:
    """A published model: its hub id, its configuration and the length of our prompt."""

    hub_id: str
    config: dict[str, Any]
    prompt_tokens: int


VARIANTS = {
    "llama": Variant(
        "meta-llama/Llama-2-7b-hf",
        {
            "vocab_size": 32000,
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
        prompt_tokens=4096,
    ),
    "llama-3.1-8b": Variant(
        "meta-llama/Llama-3.1-8B",
        {
            "vocab_size": 128256,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "bos_token_id": 128000,
            "eos_token_id": 128001,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        },
        prompt_tokens=8192,
    ),
}


def build(request: Request) -> Runnable:
    """Build Llama as requested."""
    from transformers import AutoTokenizer, LlamaForCausalLM

    from ..generation import PASSAGE, generation_runnable, prompt_ids, read_language_model
    from ..hub import read_checkpoint
    from ..offline_tokenizers import byte_tokenizer
    from ..random_weights import redraw

    variant = VARIANTS[request.name]
    tokenizer = None
    passage = PASSAGE
    trained = pretrained_weights.directory(request.name) if request.is_built_in else None
    if trained:
        model = read_language_model(LlamaForCausalLM, str(trained), request.dtype)
        tokenizer = read_checkpoint(AutoTokenizer.from_pretrained, str(trained))
        passage = (trained / "held_out.txt").read_text(encoding="utf-8")
        if request.weights == "random":
            redraw([model], seed=request.seed)
        weights = pretrained_weights.describe(request.name, request.weights, request.seed)
    elif request.is_built_in:
        tokenizer = byte_tokenizer()
        model = _tiny(variant, request, vocabulary=len(tokenizer))
        weights = f"random, seed {request.seed} (built-in tiny configuration)"
    elif request.weights == "pretrained":
        source = request.checkpoint or variant.hub_id
        _config(source)
        model = read_language_model(LlamaForCausalLM, source, request.dtype)
        tokenizer = read_checkpoint(AutoTokenizer.from_pretrained, source)
        weights = f"pretrained: {source}"
    else:
        if request.prompt is not None:
            raise ModelError(
                "--prompt has no effect with random weights of this size, which have no tokenizer: "
                "leave it out, or use --weights pretrained or --size tiny"
            )
        model = _random(variant, request)
        origin = request.checkpoint or variant.hub_id.partition("/")[2]
        weights = f"random, seed {request.seed} ({origin} configuration)"

    config = model.config
    steps = request.steps or (TINY_STEPS if request.is_tiny else FULL_STEPS)
    wanted = TINY_PROMPT_TOKENS if request.is_tiny else variant.prompt_tokens
    if trained:  # the model was not trained on later positions
        wanted = max(1, min(BUILT_IN_PROMPT_TOKENS, config.max_position_embeddings - steps))
    input_ids, prompt = prompt_ids(
        tokenizer,
        request,
        tokens=min(wanted, config.max_position_embeddings),
        vocabulary=config.vocab_size,
        passage=passage,
    )
    if trained and input_ids.shape[1] + steps > config.max_position_embeddings:
        raise ModelError(
            f"the {input_ids.shape[1] + steps:,} tokens of prompt and output exceed the "
            f"{config.max_position_embeddings:,} positions that the built-in {request.name} was "
            "trained on: use fewer --steps or a shorter --prompt"
        )
    return generation_runnable(
        model,
        request,
        input_ids=input_ids,
        prompt=prompt,
        steps=steps,
        weights=weights,
        tokenizer=tokenizer,
    )


def _tiny(variant: Variant, request: Request, *, vocabulary: int) -> LlamaForCausalLM:
    """Build 4 layers with 4 query heads and 2 key/value heads (D = 128)."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from ..inference import seeded

    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        rms_norm_eps=1e-5,
        rope_parameters=variant.config["rope_parameters"],
        bos_token_id=0,
        eos_token_id=1,
        # 1/√hidden gives queries and keys of unit size. The default, chosen for wider models,
        # would make attention almost uniform.
        initializer_range=512**-0.5,
    )
    with seeded(request.seed, request.device):
        model = LlamaForCausalLM(config)
    for parameter in model.parameters():
        # model.to(dtype) would also round the rotary frequencies, which are buffers.
        parameter.data = parameter.data.to(request.dtype)
    return model


def _random(variant: Variant, request: Request) -> LlamaForCausalLM:
    from transformers import LlamaConfig, LlamaForCausalLM

    from ..random_weights import build_random

    source = request.checkpoint
    config = _config(source) if source else LlamaConfig(**variant.config)
    return build_random(
        lambda: LlamaForCausalLM(config),
        seed=request.seed,
        dtype=request.dtype,
        device=request.device,
    )


def _config(source: str) -> LlamaConfig:
    """Read a Llama checkpoint's configuration; other models would load but give wrong results."""
    from transformers import AutoConfig

    from ..hub import read_checkpoint

    config = read_checkpoint(AutoConfig.from_pretrained, source)
    if config.model_type != "llama":
        raise ModelError(
            f"{source} is a {config.model_type} model, not a Llama: give its directory as --model"
        )
    return config
