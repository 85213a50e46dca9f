"""Finds the first tensors with NaN or infinity in a running model.

The inputs of outermost modules, the outputs of watched modules, and the tensors of attention calls
are reduced to their largest magnitude, which is NaN if any element is. On a GPU, results are read
later (`capture.hooks.tensor_peaks`). After the first forward pass of each outermost module in each
phase, modules without children, and on a GPU the inputs of small attention calls, are left out,
which saves most of the time. The search ends with the first NaN. In vLLM only attention calls are
looked at, because the tensors of modules have rows after the batch's tokens that hold anything.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from capture.call.nonfinite import is_finite
from capture.errors import reason_of, reraise_from_signal_handler
from capture.hooks.entry_points import vllm
from capture.hooks.modules import CallSite, ModuleTracker
from capture.hooks.phases import RECOMPUTE
from capture.hooks.tensor_peaks import LARGE, PeakQueue, undisturbed
from capture.storage.nonfinite_values import INFINITE, NAN, NonfiniteValues, TensorPlace

_LookFirst = Callable[[], None]


class _Look(NamedTuple):
    """Tensor that the search has reached."""

    site: CallSite
    name: str
    dtype: torch.dtype
    is_output: bool

    def place(self, **found: Any) -> TensorPlace:
        dtype = str(self.dtype).removeprefix("torch.")
        module, step, phase, forward = self.site
        return TensorPlace(module, self.name, step, phase, forward, dtype, **found)


class FirstNonfinite:
    """Watches a model's tensors until NaN is found or the recording ends.

    Args:
        tell: function that receives a sentence if the search fails.
    """

    def __init__(self, tracker: ModuleTracker, tell: Callable[[str], None]) -> None:
        self.is_watching = True
        """False once NaN was found, after the end, and after a problem."""
        self.has_nan = False
        """True once NaN is known to have occurred."""
        self._tracker, self._tell = tracker, tell
        self._leaves = {each.path for each in tracker.watched if not each.module._modules}
        """Paths of modules without children."""
        self._has_padding = vllm.serves(each.module for each in tracker.watched)
        self._passes: set[tuple[str, str]] = set()
        """Outermost modules and phases that had a forward pass."""
        self._is_first_pass = True
        self._first: TensorPlace | None = None
        self._last_finite: tuple[_Look, float] | None = None
        """Last finite output before `_first`, and its largest magnitude."""
        self._first_nan: TensorPlace | None = None
        self._latest: Callable[[], Tensor | None] = lambda: None
        """Reference to the latest tensor, which a container may return as its own output."""
        self._version = 0
        """Version of the latest tensor, which grows when the model changes it in place."""
        self._queue = PeakQueue(self._take)
        self._lock = threading.RLock()  # a signal handler may end the recording
        tracker.tensors.append(self)

    def inputs(self, site: CallSite, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Look at the tensors that an outermost module receives."""
        if self.is_watching and site.phase != RECOMPUTE:
            self._is_first_pass = (site.module, site.phase) not in self._passes
            self._passes.add((site.module, site.phase))
            given = {**{str(place): each for place, each in enumerate(args)}, **kwargs}
            named = ((f"input {name}", each) for name, each in given.items())
            if not self._has_padding:
                self._look_at(site, named, is_mask=True)

    def output(self, site: CallSite, output: Any) -> None:
        """Look at the tensors that a module returns."""
        is_chosen = self._is_first_pass or site.module not in self._leaves
        is_chosen = is_chosen and not self._has_padding
        if self.is_watching and is_chosen and site.phase != RECOMPUTE:
            self._look_at(site, _outputs(output), is_output=True)

    def attention(
        self,
        site: CallSite,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None,
        output: Tensor,
        *,
        is_padded: bool = False,
    ) -> None:
        """Look at the tensors of an attention call inside a watched module.

        Args:
            is_padded: True if some keys may be memory that was never written.
        """
        if not site.module or site.phase == RECOMPUTE:
            return

        def look_at_inputs() -> None:
            named = [("query", query), ("key", key), ("value", value)]
            self._look_at(site, named[:1] if is_padded else named)
            if attn_mask is not None and not is_padded:
                self._look_at(site, [("attn_mask", attn_mask)], is_mask=True)

        named = [("attention output", output)]
        before: _LookFirst | None = look_at_inputs
        if output.is_cuda:  # the result comes too late to look at the inputs afterwards
            before = None
            if self._is_first_pass or output.nbytes >= LARGE:
                look_at_inputs()
        self._look_at(site, named, is_output=True, before=before)

    def end(self) -> NonfiniteValues | None:
        """Stop watching, wait for the GPU, and return the first tensors that were not finite."""
        was_watching, self.is_watching = self.is_watching, False
        try:
            if was_watching:
                with self._lock:
                    self._queue.finish()
            return self._found()
        except Exception as error:
            reraise_from_signal_handler(error)
            self._give_up(error)
            return None

    def _found(self) -> NonfiniteValues | None:
        first, nan = self._first, self._first_nan
        if first is None:
            return None
        first = replace(first, parameter=self._nonfinite_parameter(first))
        last = None
        if self._last_finite is not None:
            look, largest = self._last_finite
            last = look.place(largest=largest)
        return NonfiniteValues(first, last, None if first.holds == NAN else nan)

    def _nonfinite_parameter(self, place: TensorPlace) -> str:
        """Return the name of a parameter inside the place's module that is not finite, if any."""
        is_input = place.tensor.startswith("input")
        for watched in self._tracker.watched:
            if watched.path == place.module and not is_input:
                for name, parameter in watched.module.named_parameters():
                    if _is_readable(parameter) and not is_finite(parameter.detach()):
                        return name
        return ""

    def _look_at(
        self,
        site: CallSite,
        named: Iterable[tuple[str, Any]],
        *,
        is_output: bool = False,
        is_mask: bool = False,
        before: _LookFirst | None = None,
    ) -> None:
        try:
            for name, tensor in named:
                if self.is_watching and _is_readable(tensor) and not self._is_latest(tensor):
                    look = _Look(site, name, tensor.dtype, is_output)
                    self._look(look, tensor, is_mask, before)
        except Exception as error:
            reraise_from_signal_handler(error)
            self._give_up(error)

    def _is_latest(self, tensor: Tensor) -> bool:
        return tensor is self._latest() and tensor._version == self._version

    def _look(self, look: _Look, tensor: Tensor, is_mask: bool, before: _LookFirst | None) -> None:
        if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
            return
        if not tensor.is_inference():  # inference tensors have no version
            self._latest, self._version = weakref.ref(tensor), tensor._version
        if is_mask or tensor.requires_grad or not tensor.is_cuda:
            with undisturbed(tensor):
                tensor = tensor.detach()
                if is_mask:  # -inf is an ordinary value
                    tensor = tensor.amax().clamp_min(0)
                if not tensor.is_cuda:
                    lowest, highest = torch.aminmax(tensor)
                    self._take(look, max(-lowest.item(), highest.item()), before)
        if tensor.is_cuda:
            with self._lock:
                self._queue.add(look, tensor)

    def _take(self, look: _Look, peak: float, before: _LookFirst | None = None) -> None:
        """Take note of a tensor's peak; tensors come in the order of the run.

        Args:
            before: function that looks at earlier tensors, called if this one is not finite.
        """
        if peak < math.inf:  # False for NaN
            if self._first is None and look.is_output:
                self._last_finite = look, peak
            return
        if before is not None:
            before()
        if math.isnan(peak):
            self._first_nan = self._first_nan or look.place(holds=NAN)
            self._first = self._first or self._first_nan
            self.is_watching, self.has_nan = False, True
        elif self._first is None:
            self._first = look.place(holds=INFINITE)

    def _give_up(self, error: Exception) -> None:
        self.is_watching = False
        self._tell(f"the search for NaN ended early: {reason_of(error)}")


def _outputs(output: Any) -> Iterator[tuple[str, Any]]:
    """Yield the tensors that a module returns directly, in a sequence, or in a mapping."""
    if isinstance(output, Tensor):
        yield "output", output
    elif isinstance(output, tuple | list):
        yield from ((f"output[{place}]", each) for place, each in enumerate(output))
    elif isinstance(output, Mapping):
        yield from ((f"output.{name}", each) for name, each in output.items())


_PLAIN = {Tensor, nn.Parameter}
_FLOATS = {torch.float16, torch.bfloat16, torch.float32, torch.float64}


def _is_readable(tensor: Any) -> bool:
    """Return True for a plain floating-point tensor on a CPU or an NVIDIA GPU."""
    return (
        type(tensor) in _PLAIN
        and tensor.dtype in _FLOATS
        and (tensor.is_cuda or tensor.is_cpu)
        and tensor.numel() > 0
        and tensor.layout == torch.strided
        and not tensor.is_nested
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        and not torch._C._is_tracing()
    )
