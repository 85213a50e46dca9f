"""Groups of calls that share a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from capture.text.counted import counted
from capture.text.printable import printable
from replay.report import batch_kinds
from replay.rows.errors_of_output import AccuracyClass
from replay.rows.row import DEFAULT_BASELINE, CallFacts, KernelId, Row


@dataclass(frozen=True)
class Group:
    """Calls of equal cost: same model, phase, dtype, mask and (except if a cache grows) shape.

    The batches of an inference engine are of one kind (`replay.report.batch_kinds`).
    """

    calls: list[CallFacts]
    rows: dict[KernelId, list[Row]]
    """Rows of each kernel, in the order of the calls."""
    baseline: str
    """Kernel that speed-ups are relative to; empty if it did not run."""

    @property
    def title(self) -> str:
        """Title such as `flux · denoise · 1×24×4608×128 · bfloat16 · no mask · 3 calls`."""
        return joined(*self.parts)

    @property
    def parts(self) -> tuple[str, ...]:
        """Parts of the title, some of them empty."""
        used = self.backends if self.calls[0].batch else ""
        call = (self.model, self.phase, self.shape, self.dtype, self.mask, used, self.place)
        return (*call, self.size)

    @property
    def model(self) -> str:
        return printable(self.calls[0].model)

    @property
    def phase(self) -> str:
        return printable(self.calls[0].phase)

    @property
    def shape(self) -> str:
        """Shape such as `1×4/2×1024×128`, or `1×4/2×1/1026…1031×128` if the cache grows.

        For batches it is `12…16 sequences × 1,030…2,000 keys, 32/8×128`, which ends in the heads.
        """
        shape = self.calls[0].shape
        if self.calls[0].batch:
            heads = str(shape._replace(batch=1, q_len=1, kv_len=1)).removeprefix("1×")
            return f"{batch_kinds.label(self.calls)}, {heads.replace('×1×', '×')}"
        lengths = sorted({call.shape.kv_len for call in self.calls})
        if len(lengths) == 1:
            return str(shape)
        growing = f"/{lengths[0]}…{lengths[-1]}×"
        return str(shape._replace(kv_len=0)).replace("/0×", growing)

    @property
    def dtype(self) -> str:
        return printable(self.calls[0].dtype)

    @property
    def mask(self) -> str:
        """Mask such as `causal` or `bool 1×1×64×64 mask`, followed by any options beyond SDPA."""
        first = self.calls[0]
        mask = "causal" if first.is_causal else f"{first.mask} mask" if first.mask else "no mask"
        if first.mask_structure:
            mask = f"{first.mask} mask = {first.mask_structure}"
        if first.beyond:
            mask = first.beyond if mask == "no mask" else f"{mask}, {first.beyond}"
        return printable(mask)

    @property
    def place(self) -> str:
        """Place of a single call, such as `step 3 layers.0`; empty for a group of several calls."""
        first, *others = self.calls
        return place(first) if first.module and not others else ""

    @property
    def size(self) -> str:
        """Number of calls, such as `3 calls`."""
        return counted(len(self.calls), "call")

    @property
    def weights(self) -> str:
        return printable(self.calls[0].weights)

    @property
    def backends(self) -> str:
        """Names of the backends that ran the group's calls when they were recorded."""
        return printable(", ".join(sorted({call.backend for call in self.calls} - {""})))

    @property
    def classes(self) -> list[AccuracyClass]:
        """Accuracy classes of the kernels that ran, without duplicates."""
        ran = (name for name, rows in self.rows.items() if any(row.accuracy for row in rows))
        return list(dict.fromkeys(self.class_of(name) for name in ran))

    def class_of(self, kernel: KernelId) -> AccuracyClass:
        """Return a kernel's accuracy class, which is `exact` if its rows do not specify one."""
        known = (row.accuracy_class for row in self.rows[kernel] if row.accuracy_class)
        return next(known, "exact")


def group_rows(rows: Iterable[Row], *, per_call: bool = False) -> list[Group]:
    """Group rows by cost, or by call if `per_call`, in the order of their first calls."""
    rows = [row for row in rows if row.kernel]
    shortest = _shortest_caches(row.call for row in rows)
    grouped: dict[object, list[Row]] = {}
    for row in rows:
        key = row.call.name if per_call else (_kind(row.call), shortest[row.call])
        grouped.setdefault(key, []).append(row)
    groups = [_group(members) for members in grouped.values()]
    return groups if per_call else sorted(groups, key=_order_of_batches)


def joined(*parts: str) -> str:
    """Join the non-empty parts of a title."""
    return " · ".join(filter(None, parts))


def first_few(names: Sequence[str], most: int) -> str:
    """List the first names, such as `a, b and 3 more`."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def names_by_sentence(pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Map each sentence in (name, sentence) pairs to a comma-separated list of its names."""
    found: dict[str, dict[str, None]] = {}
    for name, sentence in pairs:
        found.setdefault(sentence, {})[name] = None
    return {sentence: ", ".join(names) for sentence, names in found.items()}


def common_and_own(groups: Sequence[Group]) -> tuple[str, list[str]]:
    """Return the parts that the titles of several groups share, and distinct titles of the rest.

    A single group has no shared part.
    """
    if len(groups) == 1:
        return "", [groups[0].title]
    columns = [set(column) for column in zip(*(group.parts for group in groups), strict=True)]
    common = joined(*(next(iter(column)) for column in columns if len(column) == 1))
    titles = [
        joined(
            *(part for part, column in zip(group.parts, columns, strict=True) if len(column) > 1)
        )
        for group in groups
    ]
    return common, told_apart(groups, titles)


def told_apart(groups: Sequence[Group], names: Sequence[str]) -> list[str]:
    """Make the groups' names distinct by adding dtype, mask, weights and the first call's place.

    A property is added only where it differs between groups with the same name.
    """
    names = list(names)
    for part in _MORE:
        values: dict[str, set[str]] = {}
        for group, name in zip(groups, names, strict=True):
            values.setdefault(name, set()).add(part(group))
        names = [
            joined(name, part(group)) if len(values[name]) > 1 else name
            for group, name in zip(groups, names, strict=True)
        ]
    return names


_MORE: tuple[Callable[[Group], str], ...] = (
    lambda group: group.dtype,
    lambda group: group.mask,
    lambda group: group.weights,
    lambda group: place(group.calls[0]),
)


def _shortest_caches(calls: Iterable[CallFacts]) -> dict[CallFacts, int]:
    """Map each call to the shortest key length in the call's group.

    A cache grows by one token per step, which barely changes the cost of a decode call; a cache
    more than twice as long starts a new group.
    """
    kinds: dict[object, set[CallFacts]] = {}
    for call in calls:
        kinds.setdefault(_kind(call), set()).add(call)
    shortest: dict[CallFacts, int] = {}
    for alike in kinds.values():
        first = 0
        for call in sorted(alike, key=lambda call: call.shape.kv_len):
            if not call.batch and call.shape.kv_len > 2 * first:
                first = call.shape.kv_len
            shortest[call] = first
    return shortest


def place(call: CallFacts) -> str:
    """Return a call's place, such as `step 3 blocks.0.attn1`, or the call's name if unknown."""
    return printable(f"step {call.step} {call.module}" if call.module else call.name)


def _kind(call: CallFacts) -> tuple[object, ...]:
    shape = call.shape._replace(kv_len=0) if call.phase == "decode" else call.shape
    return (
        call.model,
        call.weights,
        call.phase,
        shape._replace(q_len=0, kv_len=0) if call.batch else shape,
        batch_kinds.kind(call),
        call.dtype,
        call.is_causal,
        call.mask and call.mask.kind,
        call.mask_structure,
        call.beyond,
    )


def _order_of_batches(group: Group) -> tuple[object, ...]:
    """Return a sort key that orders kinds of batches by phase and figures, after other calls."""
    first = group.calls[0]
    return (first.phase, *batch_kinds.kind(first)) if first.batch else ()


def _group(rows: list[Row]) -> Group:
    by_kernel: dict[KernelId, list[Row]] = {}
    for row in rows:
        by_kernel.setdefault(row.id, []).append(row)
    calls = list({row.call.name: row.call for row in rows}.values())
    return Group(calls, by_kernel, _baseline(by_kernel))


def _baseline(by_kernel: Mapping[KernelId, Sequence[Row]]) -> str:
    """Return the kernel that most speed-ups are relative to.

    Without speed-ups, because every other kernel failed, it is the default baseline, or the only
    kernel that ran correctly if the default one was not replayed or does not support the calls.
    """
    rows = [row for of_kernel in by_kernel.values() for row in of_kernel]
    compared = Counter(row.speedup.vs for row in rows if row.speedup is not None)
    if compared:
        return compared.most_common(1)[0][0]
    correct = [kernel for kernel, of in by_kernel.items() if all(row.is_correct for row in of)]
    default = KernelId(DEFAULT_BASELINE)
    if any(row.status != "unsupported" for row in by_kernel.get(default, ())):
        return default.name if default in correct else ""
    return correct[0].name if len(correct) == 1 else ""
