"""Record of a capture in the manifest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from capture.call.attention_call import Origin
from capture.errors import InvalidCall
from capture.storage.json_data import fields_of, required, typed, with_names
from capture.storage.nonfinite_values import NonfiniteValues
from capture.text.counted import counted


@dataclass
class CaptureRecord:
    """Description of one capture of one model in the manifest."""

    model: str
    weights: str
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings that rebuild the run: size, checkpoint, prompt, steps, seed, dtype, device …"""
    device: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    started: str = ""
    """Start of the capture, in UTC (ISO 8601)."""
    complete: bool = False
    """False during the run, and after a run that was interrupted or failed."""
    sample: str = ""
    modules: str = ""
    """Globs of the module paths whose calls could be stored."""
    phase: str = ""
    """Phase whose calls could be stored; empty for all."""
    heads: str = ""
    """Query heads of each call that were stored, such as `0,2-3`; empty for all."""
    calls_seen: int = 0
    attention_share: float | None = None
    """Attention's share of the time of the forward passes, from 0 to 1; None if not measured."""
    census: dict[str, Any] = field(default_factory=dict)
    """Counts of all calls, stored or not (`capture.hooks.census`).

    The census is empty if the record was rebuilt from the files.
    """

    missed_attention: list[dict[str, Any]] = field(default_factory=list)
    """Attention that is not in the census (`capture.hooks.missed_attention`)."""

    invalid_calls: list[dict[str, Any]] = field(default_factory=list)
    """Sampled calls that are not stored because the model passed invalid lengths or pages, and
    stored calls with an argument that never reached the kernel.

    Each entry has `module`, `reason`, the `step` of the first such call, and the number of `calls`.
    """

    first_nonfinite: NonfiniteValues | None = None
    """First tensors with NaN or infinity; None if all were finite, or in old recordings."""

    left_out: str = ""
    """Clause about the stored calls that a shared copy lacks; empty if it has all of them."""

    @classmethod
    def of(cls, origin: Origin) -> CaptureRecord:
        """Return a record with the data that a call of the capture contains."""
        return cls(origin.model, origin.weights, device=origin.device, versions=origin.versions)

    def is_same(self, other: CaptureRecord) -> bool:
        """Return whether both records describe the same capture, even at different times."""
        return bool(self.started) and (self.model, self.started) == (other.model, other.started)

    def supersedes(self, other: CaptureRecord) -> bool:
        """Return whether the other record describes this capture before its end."""
        return self.is_same(other) and self.complete and not other.complete

    def add_invalid(self, call: InvalidCall) -> None:
        """Count an invalid call of the model."""
        for known in self.invalid_calls:
            if (known["module"], known["reason"]) == (call.module, str(call)):
                known["calls"] += 1
                known["step"] = min(known["step"], call.step)  # calls are written in any order
                return
        self.invalid_calls.append(
            {"module": call.module, "step": call.step, "reason": str(call), "calls": 1}
        )

    @property
    def most_gain(self) -> str:
        """Largest gain that attention's share allows, in a clause; empty if the share is unknown.

        Even attention without cost makes the forward passes 1 / (1 - share) times as fast (Amdahl
        1967). Backward passes are not timed, so the clause says nothing of a whole training step.
        """
        share = self.attention_share
        if share is None:
            return ""
        most = f", which gains at most {1 / (1 - share):.2f}×" if share < 1 else ""
        return f"attention takes {share:.0%} of a forward pass{most}"

    @property
    def invalid(self) -> list[str]:
        """One sentence about each kind of invalid call."""
        return [
            f"{each['module'] or 'a call outside all modules'}, step {each['step']}: the model "
            f"calls attention with invalid arguments: {each['reason']}"
            + (f" ({counted(each['calls'], 'call')})" if each["calls"] > 1 else "")
            for each in self.invalid_calls
        ]

    def to_json(self) -> dict[str, Any]:
        """Return the manifest's record of the capture."""
        fields = with_names(vars(self), {"missed_attention": "gone_past"})
        if self.first_nonfinite is not None:
            fields["first_nonfinite"] = self.first_nonfinite.to_json()
        optional = ("gone_past", "invalid_calls", "first_nonfinite", "attention_share", "left_out")
        for name in optional:
            if not fields[name]:
                del fields[name]
        return fields

    @classmethod
    def from_json(cls, data: Any) -> CaptureRecord:
        """Read a record that `to_json` returned."""
        if isinstance(data, dict):
            data = with_names(data, {"gone_past": "missed_attention"})
            if (found := data.get("first_nonfinite")) is not None:
                data["first_nonfinite"] = NonfiniteValues.from_json(found)
        record = cls(**fields_of(cls, data))
        if not 0 <= (record.attention_share or 0) <= 1:
            raise ValueError("attention_share is not between 0 and 1")
        if record.census:
            _check_census(record.census)
        for past in record.missed_attention:
            required(past, "kind", str)
            required(past, "example", str)
            if min(required(past, "forwards", int), required(past, "modules", int)) < 0:
                raise ValueError("gone_past has a negative count")
        for invalid in record.invalid_calls:
            required(invalid, "module", str)
            required(invalid, "reason", str)
            if required(invalid, "step", int) < 0 or required(invalid, "calls", int) < 1:
                raise ValueError("invalid_calls has an invalid count")
        return record


def first_nonfinite(captures: Sequence[CaptureRecord]) -> str:
    """Return where the values of captured runs stop being finite; empty if they do not."""
    places = {each.model: str(each.first_nonfinite) for each in captures if each.first_nonfinite}
    if len(places) == 1:
        return next(iter(places.values()))
    return ", ".join(f"{place} (in {model})" for model, place in places.items())


_SIGNATURE = {
    **dict.fromkeys(("query", "key", "value"), list[int]),
    "mask": list[int] | None,
    "dtype": str,
    "mask_dtype": str | None,
    "is_causal": bool,
    "scale": float | None,
    "enable_gqa": bool,
}


def _check_census(census: dict[str, Any]) -> None:
    """Raise ValueError unless a census has the form of `capture.hooks.census.Census.to_json`."""
    signatures = required(census, "signatures", list[Any])
    for signature in signatures:
        for name, kind in _SIGNATURE.items():
            required(signature, name, kind)
        for name in ("beyond", "road", "refusal"):
            typed(str, signature.get(name, ""), name)
    for row in required(census, "rows", list[Any]):
        required(row, "module", str)
        required(row, "phase", str)
        if required(row, "calls", int) < 1:
            raise ValueError("a row of the census counts no call")
        first, last = (typed(int, row.get(name, 0), name) for name in ("first_step", "last_step"))
        if last < first:
            raise ValueError("a row of the census ends before its first step")
        if not 0 <= required(row, "signature", int) < len(signatures):
            raise ValueError("a row of the census names a missing signature")
    for batch in required({"batches": [], **census}, "batches", list[Any]):
        required(batch, "phase", str)
        queries, keys = (required(batch, name, list[int]) for name in ("queries", "keys"))
        if len(queries) != len(keys) or min((*queries, *keys), default=0) < 0:
            raise ValueError("a batch of the census has lengths that no batch has")
        if required(batch, "calls", int) < 1:
            raise ValueError("a batch of the census counts no call")
        if not 0 <= required(batch, "signature", int) < len(signatures):
            raise ValueError("a batch of the census names a missing signature")
