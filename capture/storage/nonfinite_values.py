"""Place in a recorded run where values stop being finite, as the manifest keeps it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from capture.storage.json_data import fields_of, required

NAN, INFINITE = "NaN", "infinity"


@dataclass(frozen=True)
class TensorPlace:
    """A tensor at one point of a run."""

    module: str
    """Dotted path of the module that received or returned the tensor."""
    tensor: str
    """`query`, `key`, `value`, `attn_mask` or `attention output` of an attention call; `output` of
    the module, or `output[1]` or `output.NAME` if it returns several; `input NAME` of the
    outermost module."""
    step: int
    phase: str
    forward_index: int
    dtype: str
    """Dtype such as `float16`."""
    holds: str = ""
    """`NaN`, or `infinity` without NaN; empty if all elements are finite."""
    largest: float | None = None
    """Largest magnitude; None unless all elements are finite."""
    parameter: str = ""
    """Parameter of the module with NaN or infinity; empty if none is known."""

    @property
    def step_and_module(self) -> str:
        step = f"step {self.step} ({self.phase})" if self.phase else f"step {self.step}"
        return f"{step}, {self.module}"

    @property
    def with_size(self) -> str:
        """The tensor and its largest magnitude, such as `that of mlp at step 3, up to 2 in …`."""
        size = self.largest or 0.0
        shown = f"{size:,.0f}" if 1e3 <= size < 1e6 else f"{size:.3g}"
        limit = ", whose maximum is 65,504" if self.dtype == "float16" else ""
        named = {"output": "that", "attention output": "the attention output"}
        tensor = named.get(self.tensor, self.tensor)
        return (
            f"{tensor} of {self.module} at step {self.step}, up to {shown} in {self.dtype}{limit}"
        )


@dataclass(frozen=True)
class NonfiniteValues:
    """First tensors of a run with NaN or infinity, and the last finite output before."""

    first: TensorPlace
    last_finite: TensorPlace | None = None
    """Last output of a module or of attention before `first`, with only finite elements."""
    first_nan: TensorPlace | None = None
    """First tensor with NaN, if `first` has only infinity, which a model may use as a mask."""

    def __str__(self) -> str:
        first, last, nan = self.first, self.last_finite, self.first_nan
        text = f"not finite from {first.step_and_module}: {first.tensor} has {first.holds}"
        if first.parameter:
            text += f", and so has the module's parameter {first.parameter}"
        if nan is not None:
            text += f" (NaN from {nan.step_and_module}: {nan.tensor})"
        if last is None:
            return f"{text}; no earlier output was seen"
        return f"{text}; the last finite output is {last.with_size}"

    def to_json(self) -> dict[str, Any]:
        """Return the manifest's record."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Any) -> NonfiniteValues:
        """Read a record that `to_json` returned.

        Raises:
            ValueError: the record does not have this form.
        """
        first = _place(required(data, "first", dict[str, Any]))
        last, nan = (
            None if data.get(name) is None else _place(data[name])
            for name in ("last_finite", "first_nan")
        )
        if first.holds not in (NAN, INFINITE) or (last is not None and last.largest is None):
            raise ValueError("first_nonfinite has an invalid place")
        return cls(first, last, nan)


def _place(data: Any) -> TensorPlace:
    return TensorPlace(**fields_of(TensorPlace, data, ignore_unknown=True))
