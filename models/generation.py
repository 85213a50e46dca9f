"""Loads language models, and builds runnables of prefill and greedy decode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .call_arguments import for_generate
from .errors import ModelError
from .hub import read_checkpoint, refuse_missing
from .inference import quiet, repeatable
from .language import SCORED_TOKENS, Language
from .libraries import dtype_keyword
from .outputs import of_generation
from .request import Request
from .runnable import Runnable

PASSAGE = (
    "The harbour clock had stopped at nine, and nobody in the village could remember the year. "
    "Marta wound it every Sunday all the same, because her grandmother had, and because the "
    "sailors liked to hear the key turn. In March a surveyor came with a brass level and a dog. "
    "He measured the quay, the church steps and the crooked wall behind the bakery, wrote each "
    "number twice, and asked who owned the clock. The answer took three evenings. By then the "
    "dog had learned the way to the bakery, the level stood forgotten on a barrel, and the long "
    "hand, which had not moved in living memory, pointed at ten. "
)


def read_language_model(
    model_class: type[PreTrainedModel], source: str, dtype: torch.dtype
) -> PreTrainedModel:
    """Load a transformers model from a directory or a hub id."""
    options: dict[str, Any] = {dtype_keyword("transformers"): dtype, "output_loading_info": True}
    model, report = read_checkpoint(model_class.from_pretrained, source, **options)
    refuse_missing(source, sorted(report["missing_keys"]))
    return model


def prompt_ids(
    tokenizer: PreTrainedTokenizerBase | None,
    request: Request,
    *,
    tokens: int,
    vocabulary: int,
    passage: str = PASSAGE,
) -> tuple[torch.Tensor, str]:
    """Return token ids (1, length) on the CPU, and a description of the prompt.

    The user's prompt is used in full. Without a prompt, the result has exactly ``tokens`` ids, from
    repetitions of ``passage``. Without a tokenizer, the ids are drawn at random from the seed.
    """
    if tokenizer is None:
        generator = torch.Generator().manual_seed(request.seed)
        ids = torch.randint(vocabulary, (1, tokens), generator=generator)
        return ids, f"{tokens} random token ids, seed {request.seed}"
    if request.prompt is not None:
        ids = tokenizer(request.prompt)["input_ids"]
        if not ids:
            raise ModelError("--prompt has no tokens: write some text, or leave it out")
        return torch.tensor([ids]), request.prompt
    once = len(tokenizer(passage, add_special_tokens=False)["input_ids"])
    text = passage * (tokens // once + 1)
    ids = tokenizer(text, return_tensors="pt", truncation=True, max_length=tokens)["input_ids"]
    beginning = " ".join(passage[:38].split())
    return ids, f"{beginning}… (built-in passage, {tokens} tokens)"


def reader_of_prompts(
    tokenizer: PreTrainedTokenizerBase | None,
    request: Request,
    inference: Callable[[torch.Tensor], Callable[[], Any]],
    *,
    most: int | None,
) -> Callable[[str], Callable[[], Any]] | None:
    """Return a function that prepares an inference on a prompt; None without a tokenizer.

    Args:
        inference: Prepares an inference on token ids (1, length).
        most: Maximum number of tokens of a prompt; None if any number works.
    """
    if tokenizer is None:
        return None

    def for_prompt(prompt: str) -> Callable[[], Any]:
        with quiet():
            ids = tokenizer(prompt)["input_ids"]
        if most is not None and len(ids) > most:
            raise ModelError(
                f"the prompt {prompt[:40]!r} has {len(ids):,} tokens, but {request.name} reads at "
                f"most {most:,}: shorten it, or use fewer --steps"
            )
        return inference(torch.tensor([ids]))

    return for_prompt


def generation_runnable(
    model: PreTrainedModel,
    request: Request,
    *,
    input_ids: torch.Tensor,
    prompt: str,
    steps: int,
    weights: str,
    tokenizer: PreTrainedTokenizerBase | None,
) -> Runnable:
    """Build a runnable that prefills ``input_ids`` (1, length), then decodes ``steps`` tokens."""
    arguments = for_generate(request.arguments, request.name)
    model.to(request.device).eval()
    end = model.config.get_text_config().eos_token_id
    padding = end[0] if isinstance(end, list) else end

    def inference(ids: torch.Tensor) -> Callable[[], Any]:
        inputs = ids.to(request.device)

        def infer() -> Any:
            options: dict[str, Any] = {
                "do_sample": False,
                "use_cache": True,
                "pad_token_id": padding,
            }
            return model.generate(
                inputs,
                attention_mask=torch.ones_like(inputs),
                **options
                | arguments
                # Both limits are set, so that an end-of-text token cannot shorten the run.
                | {"min_new_tokens": steps, "max_new_tokens": steps}
                | {"return_dict_in_generate": True, "output_logits": True},
            )

        return repeatable(infer, seed=request.seed, device=request.device)

    def score(ids: torch.Tensor) -> torch.Tensor:
        ids = ids.to(request.device)
        with torch.no_grad(), quiet():
            # The mask is passed as in generation, so that attention takes the same code path.
            read = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
        return read.logits[0].cpu()

    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return Runnable(
        name=request.name,
        roots={"": model},
        run=inference(input_ids),
        outputs=of_generation,
        weights=weights,
        settings=request.settings(
            prompt=prompt, prompt_tokens=input_ids.shape[1], steps=steps, output="tokens"
        ),
        for_prompt=reader_of_prompts(
            tokenizer, request, inference, most=None if positions is None else positions - steps
        ),
        extent={"prompt_tokens": input_ids.shape[1], "new_tokens": steps},
        language=Language(
            score=None if model.config.is_encoder_decoder else score,
            tokenizer=tokenizer,
            positions=positions or SCORED_TOKENS,
        ),
    )
