"""Converts the outputs of a run to named CPU tensors, so that runs can be compared and saved."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor

Kind = Literal["language", "diffusion", "training", "tensor"]


@dataclass(frozen=True)
class Outputs:
    """Outputs of one run: contiguous CPU tensors in the model's own dtypes.

    Attributes:
        kind: Kind of the model.
        tensors: Tensors by name; empty if the run returned no known output. The names by kind:

            - ``language``: ``sequences`` (1, T), prompt and new tokens; ``logits`` (steps, V), one
              row per new token, if the run returned logits. Of an engine, ``sequences`` are the
              new tokens of all requests, one request after another.
            - ``diffusion``: ``latents`` after the last step, in the pipeline's own layout, if the
              pipeline exposes them; ``frames`` (F, C, H, W) of a video or ``images`` (N, C, H, W),
              both in [0, 1], if the pipeline decodes; ``output`` for other results such as sound.
            - ``training``: ``loss`` and ``grad_norm``, (steps,) each; samples of the gradients in
              the first step, by ``first gradient of`` and the parameter's name.
            - ``tensor``: ``output``, of any shape.
    """

    kind: Kind
    tensors: dict[str, Tensor]


def of_generation(result: Any) -> Outputs:
    """Return the outputs of transformers' ``generate``, for the first sequence of a batch."""
    tensors = {"sequences": result.sequences[:1]}
    logits = getattr(result, "logits", None)
    if logits is not None:
        tensors["logits"] = torch.stack([step[0] for step in logits])
    return _outputs("language", tensors)


def of_pipeline(result: Any, *, decoded: bool) -> Outputs:
    """Return the outputs of a diffusers pipeline.

    Args:
        result: The pipeline's own result, with the last step's ``latents`` if known.
        decoded: False if the pipeline returns latents instead of pictures.
    """
    if not decoded:
        return _outputs("diffusion", {"latents": _first(result)["output"]})
    tensors = _pictures(result) or _first(result)
    latents = getattr(result, "latents", None)
    if latents is not None:
        tensors["latents"] = latents
    return _outputs("diffusion", tensors)


def of_anything(result: Any) -> Outputs:
    """Return the outputs in a result of unknown type: tokens, pictures, or the first tensor."""
    if isinstance(getattr(result, "sequences", None), Tensor):
        return of_generation(result)
    if answers := engine_answers(result):
        tokens = [token for answer in answers for token in answer]
        return _outputs("language", {"sequences": torch.tensor([tokens])})
    if pictures := _pictures(result):
        return _outputs("diffusion", pictures)
    found = _first(result)
    if found and found["output"].ndim == 2 and found["output"].dtype == torch.int64:
        # By default, `generate` returns only token ids.
        return _outputs("language", {"sequences": found["output"][:1]})
    return _outputs("tensor", found)


def engine_answers(result: Any) -> list[list[int]]:
    """Return the new tokens of each answer of an engine; empty for other results.

    Args:
        result: The requests of transformers' ``generate_batch``, with ``generated_tokens``, or of
            vLLM's ``LLM.generate``, whose ``outputs`` have ``token_ids``.
    """
    requests = list(result.values()) if isinstance(result, Mapping) else result
    if not isinstance(requests, (list, tuple)):
        return []
    answers = []
    for request in requests:
        outputs = getattr(request, "outputs", None)
        found = [request, *(outputs if isinstance(outputs, (list, tuple)) else ())]
        for each in found:
            tokens = getattr(each, "generated_tokens", getattr(each, "token_ids", None))
            if isinstance(tokens, (list, tuple)):
                answers.append(list(tokens))
    return answers


def _outputs(kind: Kind, tensors: dict[str, Tensor]) -> Outputs:
    # Copied, because a view would keep the entire tensor alive, and saving it would save all of it.
    layout = torch.contiguous_format
    return Outputs(
        kind,
        {name: each.detach().cpu().clone(memory_format=layout) for name, each in tensors.items()},
    )


def _pictures(result: Any) -> dict[str, Tensor]:
    """Return a pipeline's ``frames`` or ``images`` if they are pictures rather than latents."""
    for name in ("frames", "images"):
        pictures = _channels_first(getattr(result, name, None))
        if pictures is None or pictures.ndim < 4 or pictures.shape[-3] not in (1, 3, 4):
            continue
        known = pictures.nan_to_num()  # ignores a kernel's NaNs, which the comparison detects later
        if known.min() >= 0 and known.max() <= 1:
            return {name: pictures.flatten(0, -4)}
    return {}


def _channels_first(value: Any) -> Tensor | None:
    """Convert diffusers' output types ``pt``, ``np`` and ``pil`` to pictures (…, C, H, W)."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value).movedim(-1, -3)
    if isinstance(value, Image.Image):
        return torch.from_numpy(np.array(value.convert("RGB")) / np.float32(255)).movedim(-1, -3)
    if isinstance(value, list) and value:
        several = [_channels_first(each) for each in value]
        if all(each is not None for each in several):
            return torch.stack([each for each in several if each is not None])
    return None


def _first(result: Any) -> dict[str, Tensor]:
    first = next(_tensors(result), None)
    return {} if first is None else {"output": first}


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield every tensor in nested containers, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        yield torch.from_numpy(value)
    elif isinstance(value, Mapping):
        yield from _tensors(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from _tensors([getattr(value, field.name) for field in dataclasses.fields(value)])
