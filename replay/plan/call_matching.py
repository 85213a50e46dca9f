"""Matching of a census, which counts all calls of a model, with the replayed calls."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from attention_replay.errors import Error
from capture.call.shape import Shape
from capture.hooks.phases import RECOMPUTE
from capture.recording.sampling import PHASES
from replay.plan.batch_matching import BatchShares
from replay.plan.key_lengths import REACH
from replay.plan.step_ranges import StepRange
from replay.rows.row import HERE, CallFacts, KernelId, Mask, Row

PACKED = "packed sequences"
"""Part of `CallFacts.beyond` of an engine's batches, whether their keys lie in pages or not."""


class CensusError(Error):
    """Reason why a recording has no census; the message gives the remedy."""


@dataclass(frozen=True)
class Counted:
    """Row of the census, with the replayed calls that represent it."""

    module: str
    phase: str
    calls: int
    """Number of calls per run of the model."""
    shares: Mapping[str, float]
    """Shares of the replayed calls, by name; empty if no replayed call matches. Their sum is 1, or
    for the batches of an inference engine the work of a batch over that of the replayed ones."""
    kv_len: int
    """Key length; -1 for batches, whose sequences have lengths of their own."""
    steps: StepRange
    """Steps of the calls, which share them equally: denoising steps, or else forward passes."""


def match(
    census: Mapping[str, Any], replayed: Iterable[CallFacts], *, own_first: bool = True
) -> list[Counted]:
    """Match every row of a census with replayed calls of the same phase and signature.

    Only the key length may differ, because a cache grows. The first choice is calls of the exact
    key length, the second is interpolation between the lengths below and above it, the third is
    the nearest length within `REACH`. Calls of the same length have equal shares. The batches of an
    inference engine are matched by `replay.plan.batch_matching`, whatever their modules.

    Args:
        census: census of the model, in the form of `capture.hooks.census.Census.to_json`.
        replayed: calls of the same recording and model.
        own_first: prefer replayed calls of the same module to those of other modules.

    Raises:
        CensusError: the census is empty, e.g. because the manifest was rebuilt.
    """
    if not census.get("rows"):
        raise CensusError(
            "the recording has no census of the model's calls (its manifest was rebuilt from the "
            "files): capture it again"
        )
    by_kind: dict[object, list[CallFacts]] = {}
    for call in {call.name: call for call in replayed}.values():
        by_kind.setdefault(_kind_of_call(call), []).append(call)
    counted, batches = [], BatchShares(census)
    for row in census["rows"]:
        signature = census["signatures"][row["signature"]]
        # A call that a backward pass repeats costs the same as the original call.
        phases = PHASES if row["phase"] == RECOMPUTE else (row["phase"],)
        pool = [
            call
            for phase in phases
            for call in by_kind.get(_kind_of_signature(phase, signature), [])
        ]
        own = [call for call in pool if call.module == row["module"]]
        if own:  # another module may run another kernel
            pool = [call for call in pool if call.pinned == own[0].pinned]
        pools = (own, pool) if own_first else (pool,)
        kv_len = signature["key"][-2]
        if any(call.batch for call in pool):
            shares = batches.shares(row["phase"], row["signature"], pool)
        else:
            shares = _shares(pools, kv_len) if pool else {}
        steps = StepRange(row.get("first_step", 0), row.get("last_step", 0))
        counted.append(Counted(row["module"], row["phase"], row["calls"], shares, kv_len, steps))
    return counted


class RowsByCall:
    """Rows by call and kernel, for predicting a model that makes its calls as recorded.

    A kernel that ran a call only with its mask rewritten (`Row.restated_as`) counts as not
    supporting that call. Rows of unreadable calls are left out.

    Args:
        plain: kernel that runs plain SDPA. In a model that switched backends off, it runs the
            backend that the model chose (`CallFacts.pinned`), so it has that backend's rows.
        stand_ins: let the baseline of an engine's batches stand for the engine's own function, if
            that has no time. It may be much slower, so its time in the model must be known too.
    """

    def __init__(self, rows: Iterable[Row], plain: str, *, stand_ins: bool = False) -> None:
        self.plain = plain
        rows = list(rows)
        self._stand_ins = {
            row.call.name: row.speedup.vs
            for row in rows
            if stand_ins and row.speedup is not None and PACKED in row.call.beyond
        }
        self._rows = {(row.call.name, row.id): _as_recorded(row) for row in rows if row.kernel}
        here_last = sorted(self._rows.values(), key=lambda row: row.environment == HERE)
        self._calls = {row.call.name: row.call for row in here_last}

    def row(self, call: str, kernel: KernelId) -> Row | None:
        if kernel.name == self.plain and self.is_sdpa(call):
            kernel = kernel._replace(name=self.own(call))
        return self._rows.get((call, kernel))

    def facts(self, call: str) -> CallFacts:
        return self._calls[call]

    def own(self, call: str) -> str:
        """Return the kernel that the model itself ran; `plain` if that kernel has no time here."""
        pinned = self._calls[call].pinned if call in self._calls else ""
        if pinned and self._has_time(call, pinned):
            return pinned
        return self._stand_ins.get(call, self.plain)

    def own_row(self, call: str, environment: str = HERE) -> Row | None:
        """Return the row of the kernel that the model itself ran."""
        return self.row(call, KernelId(self.own(call), environment))

    def is_sdpa(self, call: str) -> bool:
        """Return True if the model called SDPA, so that plain SDPA is the model's own attention."""
        return call in self._calls and self._calls[call].entry_point == "sdpa"

    def timed(self) -> list[CallFacts]:
        """Return the calls for which the model's own kernel has a time."""
        return [call for name, call in self._calls.items() if self._has_time(name, self.own(name))]

    @property
    def unknown_own(self) -> str:
        """Sentence about kernels that the model ran but that have no time here; empty if none."""
        reasons = {}
        for name, call in self._calls.items():
            if call.pinned and not self._has_time(name, call.pinned) | (name in self._stand_ins):
                row = self._rows.get((name, KernelId(call.pinned)))
                reasons[call.pinned] = "cannot run here" if row is None else row.reason
        missing = ", ".join(f"{kernel} ({reason})" for kernel, reason in reasons.items())
        return f"the model's own attention was not timed here: {missing}" if missing else ""

    def _has_time(self, call: str, kernel: str) -> bool:
        row = self._rows.get((call, KernelId(kernel)))
        return row is not None and row.time_ms is not None


def _as_recorded(row: Row) -> Row:
    if not row.restated_as:
        return row
    reason = f"replayed with its mask rewritten as {row.restated_as}; the model passes the mask"
    return Row(row.kernel, row.call, "unsupported", reason, row.environment, row.process)


def _kind_of_call(call: CallFacts) -> tuple[object, ...]:
    facts = call.phase, call.shape, call.dtype, call.is_causal, call.mask, call.beyond
    return _kind(*facts, is_batch=call.batch is not None)


def _kind_of_signature(phase: str, signature: Mapping[str, Any]) -> tuple[object, ...] | None:
    query, key, value = (signature[name] for name in ("query", "key", "value"))
    if not len(query) == len(key) == len(value) == 4:
        return None
    batch, q_heads, q_len, head_dim = query
    shape = Shape(batch, q_heads, key[1], q_len, key[2], head_dim, value[3])
    mask = None
    if signature["mask"] is not None:
        is_bool = signature["mask_dtype"] == "bool"
        mask = Mask("bool" if is_bool else "float", tuple(signature["mask"]))
    options = signature["dtype"], signature["is_causal"], mask, signature.get("beyond", "")
    return _kind(phase, shape, *options, is_batch=q_len < 0)


def _kind(
    phase: str,
    shape: Shape,
    dtype: str,
    is_causal: bool,
    mask: Mask | None,
    beyond: str,
    *,
    is_batch: bool,
) -> tuple[object, ...]:
    """Return all properties that determine a call's cost, except the key length."""
    if mask is not None and mask.sizes and mask.sizes[-1] == shape.kv_len:
        mask = mask._replace(sizes=(*mask.sizes[:-1], 0))
    shape = shape._replace(q_len=0) if is_batch else shape
    return (phase, shape._replace(kv_len=0), dtype, is_causal, mask, beyond)


def _shares(pools: Sequence[Sequence[CallFacts]], kv_len: int) -> dict[str, float]:
    for pool in pools:
        lengths = [call.shape.kv_len for call in pool]
        below = [length for length in lengths if length <= kv_len]
        above = [length for length in lengths if length >= kv_len]
        if below and above:
            return _between(pool, max(below), min(above), kv_len)
    for pool in pools:
        nearest = min(
            (call.shape.kv_len for call in pool), key=lambda at: abs(at - kv_len), default=0
        )
        if max(nearest, kv_len) <= REACH * min(nearest, kv_len):
            return _between(pool, nearest, nearest, kv_len)
    return {}


def _between(pool: Sequence[CallFacts], low: int, high: int, kv_len: int) -> dict[str, float]:
    """Return shares that interpolate linearly between calls of two (possibly equal) key lengths."""
    towards_high = (kv_len - low) / (high - low) if high > low else 0.0
    shares: dict[str, float] = {}
    for length, share in ((low, 1 - towards_high), (high, towards_high)):
        names = [call.name for call in pool if call.shape.kv_len == length]
        if share > 0:
            shares.update((name, share / len(names)) for name in names)
    return shares
