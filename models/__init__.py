"""Runnable models: build one, and drive one representative inference through its whole pipeline.

This package knows nothing of recording or replaying attention. Importing it imports no torch: the
file that builds a model is imported when that model is asked for. All imports inside the package
are relative, so that it also works under another name beside a user's own ``models``.

Adding a model: write ``models/<file>.py`` with ``build(request: Request) -> Runnable`` and name it
in ``NAMES``. A name's file is its part before the first hyphen (``flux-schnell`` → ``flux.py``).
"""

from __future__ import annotations

import difflib
from importlib import import_module
from pathlib import Path

from .runnable import ModelError, Runnable

__all__ = ["NAMES", "ModelError", "Runnable", "load"]

NAMES: dict[str, str] = {
    "cogvideo": "CogVideoX-2b, text to video (diffusers)",
    "cogvideo-5b": "CogVideoX-5b, text to video, rotary positions (diffusers)",
    "flux": "FLUX.1-dev, text to image (diffusers)",
    "flux-schnell": "FLUX.1-schnell, text to image in four steps (diffusers)",
    "llama": "Llama-2-7b, prefill and greedy decode (transformers)",
    "llama-3.1-8b": "Llama-3.1-8B, grouped-query attention, prefill and greedy decode "
    "(transformers)",
}


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
) -> Runnable:
    """Build ``model`` and return it with one whole inference, ready to run.

    Args:
        model: A name from ``NAMES``, the directory of a diffusers or transformers checkpoint, or
            ``path/file.py:function``.
        size: ``"tiny"`` (built offline in a second; the default without CUDA) or ``"full"``
            (official sequence lengths; the default on CUDA and with ``checkpoint``).
        weights: ``"pretrained"`` (the default; for tiny the trained weights that come with this
            package, of the names that have some) or ``"random"``.
        checkpoint: Hub id or directory to load instead of the official one; with
            ``weights="random"`` only its configuration is used.
        prompt: Text to run on; the default is the model's own.
        steps: Denoising steps, or new tokens of a language model.
        seed: Of the weights that are random, the initial noise and everything else drawn.
        dtype: ``"float32"``, ``"bfloat16"`` or ``"float16"``; default bfloat16 on CUDA, else
            float32.
        device: A torch device such as ``"cuda:1"``; default CUDA where there is one.

    Raises:
        ModelError: The request cannot be met; one sentence with the remedy. Nothing is ever
            replaced silently by other weights or another size.

    Example:
        >>> runnable = load("llama", size="tiny")
        >>> result = runnable.run()
    """
    if model not in NAMES and not _is_user_function(model) and not Path(model).is_dir():
        raise ModelError(_unknown(model))
    # Late, so that --help needs no torch; and before the builders' own imports, which chatter.
    from .inference import quiet
    from .libraries import check, not_importable
    from .request import from_user

    if model in NAMES:
        builder = model.partition("-")[0]
        check(model, builder)
    else:
        builder = "userfunction" if _is_user_function(model) else "checkpoint"
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
        )
        try:
            module = import_module(f".{builder}", __package__)
        except (ImportError, RuntimeError) as error:  # RuntimeError: transformers' lazy imports
            raise not_importable(model, error) from error
        runnable: Runnable = module.build(request)
    return runnable


def _is_user_function(model: str) -> bool:
    return model.rpartition(":")[0].endswith(".py")


def _unknown(model: str) -> str:
    if model.endswith(".py"):
        return f"{model} names a file but no function: write {model}:FUNCTION"
    near = difflib.get_close_matches(model, NAMES, n=3, cutoff=0.5)
    names = f"did you mean {' or '.join(near)}?" if near else f"the names are {', '.join(NAMES)}."
    return (
        f"no model or directory is called {model!r}: {names} A directory that save_pretrained "
        "wrote, or FILE.py:FUNCTION, works as well"
    )
