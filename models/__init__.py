"""Runnable models: build a model, and run one representative inference through its full pipeline.

This package is independent of recording and replaying attention. Importing this package does not
import torch. All imports inside the package are relative, so that it also works under another name
alongside a user's own ``models``. In this list, a file imports only from lines below its own line:

    __init__                                     load: from the user's arguments to a runnable
    built_in/  checkpoint  userfunction          build: by name, from a directory, by a function
    diffusion  generation                        pipelines, and language models
    hub  offline_tokenizers  random_weights
    request                                      the user's request, complete and checked
    pretrained_weights  runnable
    language  training
    call_arguments  inference  libraries  outputs
    errors

To add a model, add one file to ``built_in/`` (see the docstring of that package).
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .built_in import families
from .errors import ModelError
from .libraries import check, is_failed_import, not_importable
from .runnable import Runnable

if TYPE_CHECKING:
    from .request import Request

__all__ = ["NAMES", "ModelError", "Runnable", "load"]

_FAMILIES = families()
NAMES: dict[str, str] = {name: family.NAMES[name] for name, family in _FAMILIES.items()}


def load(
    model: str,
    *,
    size: str | None = None,
    weights: str | None = None,
    checkpoint: str | None = None,
    prompt: str | None = None,
    steps: int | None = None,
    seed: int = 0,
    dtype: str | None = None,
    device: str | None = None,
    arguments: Mapping[str, str] | None = None,
) -> Runnable:
    """Build ``model``, and return a `Runnable` of the model and one full inference.

    Args:
        model: A name from ``NAMES``, the directory of a diffusers or transformers checkpoint, or
            ``path/file.py:function``.
        size: ``"tiny"`` (built offline in a second; the default without CUDA) or ``"full"``
            (official sequence lengths; the default on CUDA and with ``checkpoint``).
        weights: ``"pretrained"`` (the default; for tiny, the trained weights shipped with this
            package, which exist for some names) or ``"random"``.
        checkpoint: Hub id or directory to load instead of the official checkpoint; with
            ``weights="random"``, only its configuration is used.
        prompt: Input text; the default depends on the model.
        steps: Number of denoising steps, or of new tokens of a language model.
        seed: Seed of random weights, initial noise and all other random numbers.
        dtype: ``"float32"``, ``"bfloat16"`` or ``"float16"``; by default bfloat16 on CUDA, else
            float32.
        device: A torch device such as ``"cuda:1"``; by default CUDA if available.
        arguments: Other arguments of the pipeline or of ``generate``, as text, by name.

    Raises:
        ModelError: The request cannot be fulfilled; the message names the remedy. Other weights or
            sizes are never substituted silently.

    Example:
        >>> runnable = load("llama", size="tiny")
        >>> result = runnable.run()
    """
    if model not in NAMES and not _is_user_function(model) and not Path(model).is_dir():
        raise ModelError(_unknown(model))
    # Imported late, so that --help does not import torch, but before the builders, which log.
    from .inference import quiet
    from .request import from_user

    if model in NAMES:
        check(model, _FAMILIES[model].NEEDS)
    with quiet():
        request = from_user(
            model,
            named=model in NAMES,
            size=size,
            weights=weights,
            checkpoint=checkpoint,
            prompt=prompt,
            steps=steps,
            seed=seed,
            dtype=dtype,
            device=device,
            arguments=arguments,
        )
        try:
            runnable = _builder(model)(request)
        except (ImportError, RuntimeError) as error:
            if is_failed_import(error):
                raise not_importable(model, error) from error
            raise
    options = {"prompt": prompt, "steps": steps, "dtype": dtype, "arguments": arguments or None}
    given = {name: value for name, value in options.items() if value is not None}
    runnable.settings = {"model": model, "given": given, **runnable.settings}
    return runnable


def _builder(model: str) -> Callable[[Request], Runnable]:
    if model in NAMES:
        return _FAMILIES[model].build
    file = "userfunction" if _is_user_function(model) else "checkpoint"
    module: Any = import_module(f".{file}", __package__)
    return module.build


def _is_user_function(model: str) -> bool:
    return model.rpartition(":")[0].endswith(".py")


def _unknown(model: str) -> str:
    if model.endswith(".py"):
        return f"{model} is a file without a function: write {model}:FUNCTION"
    near = difflib.get_close_matches(model, NAMES, n=3, cutoff=0.5)
    names = f"did you mean {' or '.join(near)}?" if near else f"choose from {', '.join(NAMES)}."
    return (
        f"no model or directory is called {model!r}: {names} A directory written by "
        "save_pretrained, or FILE.py:FUNCTION, also works"
    )
