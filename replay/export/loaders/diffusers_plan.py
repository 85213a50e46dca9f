"""Attention backends for the modules of a diffusers pipeline, by range of denoising steps.

`replay export` wrote this file. It needs diffusers, and attention_kernels if a backend has that
name:

    import attention_plan

    plan = attention_plan.load(pipe)
    pipe("a panda playing guitar", callback_on_step_end=plan)
    plan.remove()
"""

from __future__ import annotations

from typing import Any

from diffusers.models import attention_dispatch
from torch import nn

Plan = list[tuple[int, dict[str, str]]]

PLAN: Plan = []
"""First denoising step of each range, and the backends of the modules there."""


class AttentionPlan:
    """Plan in a pipeline, until `remove`. It is the pipeline's `callback_on_step_end`.

    Args:
        model: a pipeline, or its transformer.

    Raises:
        ValueError: the model lacks a module of the plan, or the module does not use diffusers'
            attention dispatcher (CogVideoX and Stable Diffusion 3 call SDPA themselves).
        RuntimeError: the library of a backend is not installed.
    """

    def __init__(self, model: Any) -> None:
        modules = _modules(model)
        self._plan = [
            (first, {path: _backend(name) for path, name in backends.items()})
            for first, backends in PLAN
        ]
        paths = dict.fromkeys(path for _, backends in PLAN for path in backends)
        self._processors = {path: _processor(modules, path) for path in paths}
        if len({id(processor) for processor in self._processors.values()}) < len(paths):
            raise ValueError("attention modules share a processor: give each its own")
        self._own = {path: each._attention_backend for path, each in self._processors.items()}
        self.set_step(0)

    def __call__(self, pipe: Any, step: int, timestep: Any, values: dict[str, Any]) -> Any:
        """Set the backends of the step after `step`, or of step 0 after the last step."""
        self.set_step(step + 1 if step + 1 < pipe.num_timesteps else 0)
        return values

    def set_step(self, step: int) -> None:
        """Set the backends of a denoising step, counted from 0."""
        backends: dict[str, Any] = {}
        for first, each in self._plan:
            if first <= step:
                backends = each
        for path, processor in self._processors.items():
            processor._attention_backend = backends.get(path, self._own[path])

    def remove(self) -> None:
        """Restore the backends that the modules had before."""
        for path, processor in self._processors.items():
            processor._attention_backend = self._own[path]


load = AttentionPlan


def _modules(model: Any) -> dict[str, nn.Module]:
    """Return the modules of a pipeline or a model by path."""
    roots = model.components if hasattr(model, "components") else {"": model}
    return {
        f"{name}.{path.replace('_orig_mod.', '')}".strip("."): module
        for name, root in roots.items()
        if isinstance(root, nn.Module)
        for path, module in root.named_modules()
    }


def _processor(modules: dict[str, nn.Module], path: str) -> Any:
    # A path begins with the name of the pipeline's component, which a transformer alone lacks.
    module = modules.get(path, modules.get(path.partition(".")[2]))
    processor = getattr(module, "processor", None)
    if module is None:
        raise ValueError(f"the model has no module {path!r}: load the model of the plan")
    if not hasattr(processor, "_attention_backend"):
        raise ValueError(f"{path!r} does not use the attention dispatcher of diffusers")
    return processor


def _backend(name: str) -> Any:
    """Return a backend, after checking that its library is installed."""
    if name.startswith("attention_kernels"):
        import attention_kernels

        attention_kernels.register("diffusers")
    backend = attention_dispatch.AttentionBackendName(name)
    attention_dispatch._check_attention_backend_requirements(backend)
    attention_dispatch._maybe_download_kernel_for_backend(backend)
    return backend
