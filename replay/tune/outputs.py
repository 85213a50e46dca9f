"""Converts what a run returned to the named tensors that `replay.end_to_end.drift` compares."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from attention_replay.errors import Error
from capture.models_package import import_models

CHANNELS = (1, 3, 4)
"""Numbers of channels of a picture."""

RETURNS = (
    "return a tensor, PIL pictures, numpy frames, a text, the output of a pipeline or of "
    'generate, or {"input_ids": …, "logits": …}'
)


class OutputError(Error):
    """Reason why a run's result cannot be judged; the message gives the remedy."""


def named_tensors(result: Any) -> dict[str, Tensor]:
    """Return the tensors of a run's result, by the names of `replay.end_to_end.drift`.

    The result may be a tensor; pictures or frames, as PIL pictures, numpy arrays (…, H, W, C) of
    uint8 or of floats in [0, 1], or a tensor (…, C, H, W) in [0, 1]; a text or token ids (1, T); a
    mapping of `input_ids` (1, T) and `logits` (1, T, V); the output of a diffusers pipeline or of
    `generate`; a list of tensors, which are joined; or a dataclass, list or mapping that begins
    with a tensor. Texts are compared by their characters; a list of texts is one text.

    Returns:
        Contiguous tensors on the CPU.

    Raises:
        OutputError: the result is of another type.
    """
    _check(result)
    if isinstance(result, str):
        return {"sequences": torch.tensor([[*map(ord, result)]], dtype=torch.int64)}
    if isinstance(result, Mapping) and {"input_ids", "logits"} <= result.keys():
        return _text(result["input_ids"], result["logits"])
    if isinstance(result, (list, tuple)) and len(result) == 1:
        return named_tensors(result[0])  # the tuple of a pipeline with return_dict=False
    if isinstance(result, (list, tuple)) and result and all(isinstance(s, str) for s in result):
        return named_tensors("\n".join(result))
    of_anything = import_module(f"{import_models().__name__}.outputs").of_anything
    is_list = isinstance(result, (list, tuple)) and all(isinstance(t, Tensor) for t in result)
    pictures = None if is_list and len({t.shape for t in result}) > 1 else _as_pictures(result)
    if pictures is not None:
        found = of_anything(SimpleNamespace(images=pictures)).tensors
        if found:
            return dict(found)
    if is_list and result:
        return {"output": torch.cat([t.detach().cpu().flatten().to(torch.float32) for t in result])}
    tensors = dict(of_anything(result).tensors)
    latents = getattr(result, "latents", None)
    if {"images", "frames"} & tensors.keys() and isinstance(latents, Tensor):
        tensors["latents"] = latents.detach().cpu().clone(memory_format=torch.contiguous_format)
    if not tensors:
        raise OutputError(f"run() returned {_named(result)}, which cannot be judged: {RETURNS}")
    return tensors


def _check(result: Any) -> None:
    """Raise OutputError for tensors whose values cannot be compared."""
    if isinstance(result, Mapping):
        result = list(result.values())
    if isinstance(result, (list, tuple)):
        for each in result:
            _check(each)
    if not isinstance(result, Tensor):
        return
    kinds = {
        "sparse": result.layout is not torch.strided and not result.is_nested,
        "nested": result.is_nested,
        "quantised": result.is_quantized,
        "complex": result.is_complex(),
        "meta": result.is_meta,
    }
    if kind := next((name for name, holds in kinds.items() if holds), ""):
        raise OutputError(
            f"run() returned a {kind} tensor, which cannot be judged: return real values in a "
            "dense tensor, for example by to_dense(), dequantize() or torch.view_as_real()"
        )


def _text(ids: Any, logits: Any) -> dict[str, Tensor]:
    """Return a text and its logits, as `drift` names them."""
    if not (isinstance(ids, Tensor) and isinstance(logits, Tensor)):
        raise OutputError(
            f"run() returned input_ids of type {type(ids).__name__} and logits of type "
            f"{type(logits).__name__}: return tensors (1, T) and (1, T, V)"
        )
    if ids.ndim != 2 or logits.ndim != 3 or ids.shape != logits.shape[:2] or len(ids) != 1:
        raise OutputError(
            f"run() returned input_ids of shape {tuple(ids.shape)} and logits of shape "
            f"{tuple(logits.shape)}: return one text, (1, T) and (1, T, V)"
        )
    return {"text_ids": ids.detach().cpu().clone(), "text_logits": logits[0].detach().cpu().clone()}


def _as_pictures(result: Any) -> Any:
    """Return a result that may consist of pictures as values in [0, 1]; None for any other."""
    if isinstance(result, Image.Image):
        return [result]
    if isinstance(result, Tensor) and result.is_floating_point() and result.ndim >= 3:
        pictures = result if result.ndim > 3 else result[None]
        return pictures if pictures.shape[-3] in CHANNELS else None
    if isinstance(result, np.ndarray) and result.ndim >= 3 and result.shape[-1] in CHANNELS:
        frames = result if result.ndim > 3 else result[None]
        return frames / np.float32(255) if result.dtype == np.uint8 else frames
    if isinstance(result, (list, tuple)) and result:
        found = [_as_pictures(each) for each in result]
        if any(each is None for each in found):
            return None
        return [each[0] if len(each) == 1 else each for each in found]
    return None


def _named(result: Any) -> str:
    kind = type(result).__name__
    if isinstance(result, (list, tuple)) and result:
        return f"a {kind} of {type(result[0]).__name__}"
    return "None" if result is None else f"an object of type {kind}"
