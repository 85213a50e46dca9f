"""Counts vLLM's calls inside CUDA graphs of whole steps, which call no backend.

Every step builds the metadata of its layers. If the next step comes before any layer has run in
Python, a graph ran the whole step. The last step of a recording is therefore not counted.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from capture.errors import warned
from capture.hooks.entry_points.functions import replaced
from capture.hooks.interceptor import Arguments, Handler, answer
from capture.hooks.modules import named_site

REFUSAL = (
    "inside a CUDA graph of a whole step; start vLLM with --enforce-eager or "
    "-cc.cudagraph_mode=PIECEWISE to record these"
)


def is_capturing(tensor: Tensor) -> bool:
    """Return whether a CUDA graph is being made on the tensor's device, so that nothing runs."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


class WholeGraphs:
    """Counter of calls that run inside CUDA graphs of whole steps.

    Args:
        handler: receiver of the calls, which are refused.
        phase_of: function that returns the phase of a batch.
    """

    def __init__(self, handler: Handler, phase_of: Callable[[Any], str], entry_point: str) -> None:
        self._handler, self._phase_of, self._entry_point = handler, phase_of, entry_point
        self._step: dict[Any, Any] = {}
        """Batch of each builder of the latest step; empty once a layer has run in Python."""
        self._is_building = False

    def a_layer_ran(self) -> None:
        """Note that a layer of this step ran in Python."""
        self._step.clear()

    @contextlib.contextmanager
    def follow(self, builds: Iterable[Callable[..., Any]]) -> Iterator[None]:
        """Count until the exit.

        Args:
            builds: `build` of each class of builders.
        """
        with contextlib.ExitStack() as stack:
            for build in builds:
                stack.enter_context(replaced(build, self._following))
            yield
            self._count()

    def _following(self, build: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(build)
        def following(
            builder: Any,
            common_prefix_len: int,
            common_attn_metadata: Any,
            *args: Any,
            **kwargs: Any,
        ) -> Any:
            given = (builder, common_prefix_len, common_attn_metadata)
            if self._is_building:  # a builder may call the one that it extends
                return build(*given, *args, **kwargs)
            if builder in self._step:
                self._count()
            self._is_building = True
            try:
                metadata = build(*given, *args, **kwargs)
            finally:
                self._is_building = False
            self._step[builder] = common_attn_metadata
            return metadata

        return following

    def _count(self) -> None:
        """Count a call of each layer for a step in which no layer ran in Python."""
        step, self._step = self._step, {}
        if not step:
            return
        with warned("calls inside a CUDA graph could not be counted"):
            builder, common = next(iter(step.items()))
            rows = torch.zeros(()).expand(1, 1, common.num_actual_tokens, 1)
            arguments = Arguments.of(rows, rows, rows, None, entry_point=self._entry_point)
            arguments = arguments._replace(refusal=REFUSAL)
            phase = self._phase_of(common)
            layers = builder.vllm_config.compilation_config.static_forward_context
            for name in [name for name, layer in layers.items() if hasattr(layer, "impl")]:
                with named_site(name, phase):
                    answer(self._handler, arguments, lambda: rows, lambda: rows)
