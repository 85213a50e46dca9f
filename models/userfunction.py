"""Builds a user's own model with a function, given as ``path/file.py:function``.

The function returns ``(module, run)``. ``module`` is an ``nn.Module``, a dictionary of modules by
name, or a diffusers pipeline; ``run`` is a callable that runs one inference, without arguments or
with a ``prompt``. The function may declare any of the arguments ``seed``, ``device`` (a
``torch.device``), ``dtype`` (a ``torch.dtype``), ``steps`` and ``prompt``. ``steps`` and ``prompt``
are passed only if the user gave them, so that the function's own defaults apply.

``run`` may train: it enters ``torch.enable_grad()``, calls ``backward()`` and perhaps an optimiser
of ``torch.optim``, and returns its loss, or one for each step. All steps are undone after the run.
"""

from __future__ import annotations

import difflib
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from .call_arguments import refuse
from .errors import ModelError
from .inference import seeded
from .outputs import of_anything
from .request import Request
from .runnable import Runnable
from .training import Trained, Training


def build(request: Request) -> Runnable:
    """Build a runnable by calling the user's function."""
    refuse(request.arguments, request.name)
    file, _, name = request.name.rpartition(":")
    path = Path(file).expanduser().resolve()
    if not path.is_file():
        raise ModelError(f"{file} does not exist: write PATH/FILE.py:FUNCTION")
    with _importable(path.parent):
        function = _function(_import(path, file), name, file)
        arguments = _arguments(function, request, file)
        with seeded(request.seed, request.device):
            try:
                built = function(**arguments)
            except (Exception, SystemExit) as error:
                raise ModelError(f"{name} in {file} failed: {_describe(error)}") from error
    roots, run = _checked(built, request.name)
    pipeline = built[0] if _is_pipeline(built[0]) else None
    for root in roots.values():
        root.eval()

    prompt, training = _prompt_parameter(run), Training(roots)

    def infer(**text: str) -> Any:
        if prompt is not None and prompt.default is prompt.empty and not text:
            raise ModelError(
                f"the run of {name} in {file} needs a prompt: give this parameter a default, or "
                "tune with --prompts FILE"
            )
        with (
            _importable(path.parent),
            torch.no_grad(),
            seeded(request.seed, request.device),
            training.undone() as steps,
        ):
            try:
                result = run(**text)
            except SystemExit as error:  # would end the command as if it had succeeded
                raise ModelError(f"the run of {name} in {file} ended in {_describe(error)}") from (
                    error
                )
            except RuntimeError as error:
                if "does not require grad" not in str(error) or torch.is_grad_enabled():
                    raise
                raise ModelError(
                    f"the run of {name} in {file} calls backward() without gradients: train inside "
                    "`with torch.enable_grad():`"
                ) from error
        return Trained(result, steps) if steps.squares else result

    given = {option: getattr(request, option) for option in ("prompt", "steps")}
    return Runnable(
        name=request.name,
        roots=roots,
        run=infer,
        outputs=lambda result: (
            result.outputs() if isinstance(result, Trained) else of_anything(result)
        ),
        weights=f"user's own: {request.name}",
        settings=request.settings(**given),
        pipeline=pipeline,
        for_prompt=(lambda text: partial(infer, prompt=text)) if prompt else None,
    )


@contextmanager
def _importable(directory: Path) -> Iterator[None]:
    """Allow imports from the user's directory, but only while the user's code runs."""
    entry = str(directory)
    sys.path.insert(0, entry)
    try:
        yield
    finally:
        sys.path.remove(entry)


def _import(path: Path, file: str) -> ModuleType:
    private_name = f"_attention_replay_user_{path.stem}"
    spec = spec_from_file_location(private_name, path)
    assert spec is not None  # the name ends in .py, so it has a loader
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[private_name] = module  # dataclasses and pickle look up their module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[private_name]
        raise ModelError(f"{file} could not be imported: {_describe(error)}") from error
    return module


def _function(module: ModuleType, name: str, file: str) -> Callable[..., Any]:
    function: Callable[..., Any] | None = getattr(module, name, None)
    if not callable(function):
        own = [
            other
            for other, value in vars(module).items()
            if inspect.isfunction(value)
            and value.__module__ == module.__name__
            and not other.startswith("_")
        ]
        near = difflib.get_close_matches(name, own)
        remedy = f"did you mean {' or '.join(near)}?" if near else f"choose from {', '.join(own)}"
        raise ModelError(f"{file} has no function {name!r}: {remedy if own else 'add it'}")
    return function


def _arguments(function: Callable[..., Any], request: Request, file: str) -> dict[str, Any]:
    """Return the available arguments that the function declares."""
    declared = inspect.signature(function).parameters
    # Defaults may be ignored, but not options that the user gave.
    if ignored := sorted(request.given - declared.keys()):
        raise ModelError(
            f"the function in {file} takes no {' or '.join(ignored)}: leave out "
            f"{' and '.join('--' + option for option in ignored)}, or declare it"
        )
    offered: dict[str, Any] = {
        "seed": request.seed,
        "device": request.device,
        "dtype": request.dtype,
    }
    for option in request.given & {"prompt", "steps"}:
        offered[option] = getattr(request, option)
    filled = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [
        name
        for name, parameter in declared.items()
        if parameter.default is parameter.empty and parameter.kind not in filled
    ]
    if missing := [name for name in needed if name not in offered]:
        raise ModelError(
            f"{request.name} needs {' and '.join(missing)}: name a function that returns (module, "
            f"run) and is called without {'it' if len(missing) == 1 else 'them'}"
        )
    return {name: value for name, value in offered.items() if name in declared}


def _prompt_parameter(run: Callable[..., Any]) -> inspect.Parameter | None:
    """Return the parameter ``prompt`` of a user's run; None if it has none."""
    try:
        return inspect.signature(run).parameters.get("prompt")
    except ValueError:  # some functions written in C have no signature
        return None


def _checked(built: Any, name: str) -> tuple[dict[str, nn.Module], Callable[..., Any]]:
    if isinstance(built, tuple) and len(built) == 2:
        module, run = built
        roots = {"": module} if isinstance(module, nn.Module) else module
        if _is_pipeline(module):
            parts = module.components.items()
            roots = {part: root for part, root in parts if isinstance(root, nn.Module)}
        if (
            isinstance(roots, dict)
            and roots
            and all(isinstance(root, nn.Module) for root in roots.values())
            and callable(run)
        ):
            return roots, run
    returned = type(built).__name__
    if isinstance(built, tuple):
        returned = f"({', '.join(type(item).__name__ for item in built)})"
    raise ModelError(
        f"{name} must return (module, run): an nn.Module, a dictionary of them or a diffusers "
        f"pipeline, and a function that runs it; but it returned {returned}"
    )


def _is_pipeline(module: Any) -> bool:
    return not isinstance(module, nn.Module) and isinstance(
        getattr(module, "components", None), dict
    )


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
