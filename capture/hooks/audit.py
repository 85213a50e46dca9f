"""Counts every attention function and operator that runs outside of the calls that were seen.

A PyTorch mode sees each function and operator of the thread that enters the mode. It adds some
microseconds to each of them, so only an audit uses modes. Modes miss other threads, attention
computed by matrix products, and libraries that call their kernels directly.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from capture.hooks.interceptor import TORCH_SDPA, is_inside
from capture.hooks.modules import ModuleTracker
from capture.text.counted import counted


class Audit:
    """Counts of unseen attention during `counted()`, by operator name and module path."""

    def __init__(self, tracker: ModuleTracker) -> None:
        self._tracker = tracker
        self._is_counted = False
        """True while a counted function runs; operators inside that function are not counted."""
        self.calls: Counter[tuple[str, str]] = Counter()

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Count the attention that this thread runs until the context exits."""
        with _Functions(self), _Operators(self):
            yield

    def run(self, name: str, function: Callable[[], Any]) -> Any:
        """Run a function; count it unless it runs inside a call that was seen or counted."""
        if not name or is_inside() or self._is_counted:
            return function()
        self.calls[name, self._tracker.site.module] += 1
        self._is_counted = True
        try:
            return function()
        finally:
            self._is_counted = False

    def __str__(self) -> str:
        """Format as `audit: not seen: 48 calls of aten::… (such as in layers.1)`."""
        by_name: Counter[str] = Counter()
        for (name, _), count in self.calls.items():
            by_name[name] += count
        examples = dict(reversed(self.calls))
        unseen = ", ".join(
            f"{counted(count, 'call')} of {name} "
            f"(such as in {examples[name] or 'no watched module'})"
            for name, count in by_name.items()
        )
        return f"audit: not seen: {unseen}" if unseen else "audit: no attention operator was missed"


class _Functions(TorchFunctionMode):
    def __init__(self, audit: Audit) -> None:
        super().__init__()
        self._audit = audit

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # `func` is looked up by name, so it is our replacement. Calls of the replacement itself do
        # not arrive here: this caller still holds the built-in function.
        name = "scaled_dot_product_attention"
        if getattr(func, "__name__", "") != name or is_inside():
            return func(*args, **(kwargs or {}))
        return self._audit.run(name, lambda: TORCH_SDPA(*args, **(kwargs or {})))


class _Operators(TorchDispatchMode):
    supports_higher_order_operators = True
    """True, because FlexAttention is a higher-order operator."""

    def __init__(self, audit: Audit) -> None:
        super().__init__()
        self._audit = audit

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self._audit.run(_attention(func), lambda: func(*args, **(kwargs or {})))


@functools.lru_cache(maxsize=4096)
def _attention(operator: Any) -> str:
    """Return the name of an operator that computes attention; empty for other operators."""
    found = operator.name() if callable(getattr(operator, "name", None)) else str(operator)
    computes = re.search("attention|attn|_transformer_encoder_layer_fwd", found.lower())
    return "" if computes is None or "backward" in found else found.partition(".")[0]
