"""Contents of a printed comparison, in order: sentences and tables."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from capture.text.counted import counted
from capture.text.printable import printable
from replay.comparison.accuracy_change import AccuracyChange, AccuracyVerdict
from replay.comparison.comparison import Comparison, KernelChange, Pair, smallest_slowdown
from replay.comparison.conditions import Condition
from replay.comparison.speed_change import SpeedChange, ratio_text
from replay.comparison.undecided import Undecided, grouped, speed_conditions, undecided
from replay.report.groups import first_few, place
from replay.rows.row import HERE, KernelId, Machine, Row, SpeedVerdict

LONGEST = 200
"""Maximum length, in characters, of a sentence that comes from a row."""

LINES = 20
"""Maximum number of table lines in text and Markdown; the JSON output has all lines."""

NAMED = 5
"""Maximum number of kernels named in a sentence."""

WORDS = {"slow": "slower", "fast": "faster", "inconclusive": "undecided"}
"""Words for verdicts, the same in all texts."""

SPEED_WORDS: tuple[SpeedVerdict, ...] = ("same", "fast", "slow", "inconclusive")
ACCURACY_WORDS: tuple[AccuracyVerdict, ...] = ("same", "better", "worse", "inconclusive")
FAILING = {"failed", "refused"}
WORSE = {*FAILING, "worse", "slow"}


@dataclass(frozen=True)
class Table:
    """Table of a comparison, whose worst lines come first."""

    title: str
    headings: tuple[str, ...]
    lines: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Sections:
    """Contents of a printed comparison."""

    title: str
    answer: str
    """Summary in one sentence."""
    machine: str
    """Machine and versions of the later run, and when both were measured."""
    is_worse: bool
    """True if a kernel got worse or rows are missing."""
    is_undecided: bool
    """True if a kernel may have become slower, although the rows do not show it."""
    notes: tuple[str, ...]
    """Sentences about how the runs were compared."""
    counts: Table
    tables: tuple[Table, ...]
    """Tables that have at least one line."""


def sections(comparison: Comparison, conditions: Sequence[Condition] = ()) -> Sections:
    """Describe a comparison in sentences and tables.

    Args:
        conditions: those of `--fail-on`; without `slow`, a slowdown of 3 % counts as undecided.
    """
    unclear = undecided(comparison, speed_conditions(conditions))
    tables = (_kernels(comparison), _rows(comparison), _came_and_went(comparison))
    return Sections(
        title=title(comparison),
        answer=_answer(comparison, unclear),
        machine=_machine(comparison),
        is_worse=bool(comparison.missing)
        or any(_changes(each.pairs, each.speed) & WORSE for each in comparison.kernels),
        is_undecided=bool(unclear),
        notes=tuple(map(printable, _notes(comparison))),
        counts=_counts(comparison),
        tables=tuple(table for table in tables if table.lines),
    )


def title(comparison: Comparison) -> str:
    """Name both runs by their commits, and the device; by their files if a commit is unknown."""
    runs = (comparison.before, comparison.after)
    names = [run.commit for run in runs]
    if not all(names) or names[0] == names[1]:
        names = [run.name for run in runs]
    first, second = (
        f"{name} ({run.measured_at[:10]})" if run.measured_at else name
        for name, run in zip(names, runs, strict=True)
    )
    devices = " → ".join(dict.fromkeys(_devices(run.devices) for run in runs if run.devices))
    return printable(f"{first} → {second}{f' on {devices}' if devices else ''}")


def in_order(comparison: Comparison) -> list[KernelId]:
    """Return the kernels, the worst change first."""
    return [each.kernel for each in sorted(comparison.kernels, key=_order)]


def undecided_rows(comparison: Comparison) -> Table:
    """Return the table of rows whose speed or accuracy is undecided, the slowest first."""
    lines = [
        (printable(str(pair.before.id)), _call(pair.before), "; ".join(texts))
        for pair in sorted(comparison.pairs, key=_order)
        if (texts := list(_undecided(comparison, pair)))
    ]
    return Table("undecided rows", ("kernel", "call", "change"), tuple(lines))


def _undecided(comparison: Comparison, pair: Pair) -> Iterator[str]:
    if comparison.hides_speed(pair):
        yield from map(printable, pair.unconfirmed)
    if pair.speed and pair.speed.verdict == "inconclusive":
        yield speed_text(pair.speed)
    if pair.accuracy and pair.accuracy.verdict == "inconclusive":
        yield accuracy_text(pair.accuracy)


def pair_text(pair: Pair) -> str:
    """Describe the change of a kernel on a call, with the reason if its output became wrong."""
    speed = _outcome(pair) or ("" if pair.speed is None else speed_text(pair.speed))
    accuracy = ""
    if pair.accuracy and pair.accuracy.verdict != "same":
        accuracy = accuracy_text(pair.accuracy)
    reason = printable(pair.after.reason) if pair.became_wrong else ""
    return "; ".join(filter(None, (speed, accuracy, reason)))


def speed_text(change: SpeedChange) -> str:
    """Format a change of speed as `0.95× (0.94-0.96) slower`; add the reason if not obvious."""
    if change.reason == "too-few-calls":
        return f"{ratio_text(change.ratio)} in the median"
    word = WORDS.get(change.verdict, "same")
    if change.low is None or change.high is None:
        return f"{ratio_text(change.ratio)} {word}, {change.reason}"
    text = f"{change.ratio:.3f}× ({change.low:.3f}-{change.high:.3f}) {word}"
    return f"{text}, {change.reason}" if change.verdict == "inconclusive" else text


def accuracy_text(change: AccuracyChange) -> str:
    """Format a change of accuracy as `error ×1.4 (1.3-1.5) worse, error-grew`."""
    if change.reason == "identical":
        return "identical"
    within = "" if change.low is None else f" ({change.low:.2g}-{change.high:.2g})"
    where = "" if change.place is None else f" (head {change.place[0]}, range {change.place[1]})"
    grown = "from 0" if math.isinf(change.ratio) else f"×{change.ratio:.3g}"
    if change.reason == "now-inaccurate":
        return f"error {grown}{within} wrong now"
    word = WORDS.get(change.verdict, change.verdict)
    return f"error {grown}{within} {word}, {change.reason}{where}"


def _answer(comparison: Comparison, unclear: Sequence[Undecided]) -> str:
    parts = [
        _named("failing", comparison, lambda pair: bool(pair.changes & FAILING)),
        _named("wrong", comparison, lambda pair: pair.became_wrong),
        _named("less accurate", comparison, _is_less_accurate),
        _named("slower", comparison, lambda pair: "slow" in pair.changes, "slow"),
        _named("faster", comparison, lambda pair: "fast" in pair.changes, "fast"),
    ]
    if comparison.missing:
        parts.append(f"{counted(len(comparison.missing), 'row')} missing")
    for reason, kernels in grouped(unclear).items():
        names = dict.fromkeys(str(each) for each in kernels)
        parts.append(printable(f"undecided: {first_few(list(names), NAMED)}: {reason}"))
    return "; ".join(filter(None, parts)) or "nothing changed"


def _is_less_accurate(pair: Pair) -> bool:
    return "worse" in pair.changes and not pair.became_wrong


def _named(
    word: str, comparison: Comparison, holds: Callable[[Pair], bool], verdict: str = ""
) -> str:
    """Name the kernels with this verdict over all their calls, or for which some pairs hold."""
    over_all, on_some = [], []
    for each in sorted(comparison.kernels, key=_order):
        name = printable(str(each.kernel))
        count = sum(map(holds, each.pairs))
        if each.speed is not None and each.speed.verdict == verdict:
            over_all.append(name)
        elif count:
            on_some.append(f"{name} ({count:,} of {counted(len(each.pairs), 'call')})")
    names = over_all + on_some
    if not names:
        return ""
    return f"{word}: {first_few(names, NAMED)}"


def _machine(comparison: Comparison) -> str:
    """Return a line such as `NVIDIA H100 · torch 2.11 · measured 2026-11-28 08:15 UTC`."""
    after = comparison.after
    machine = next((row.machine for row in after.rows if row.machine.device), Machine())
    times = [
        f"{run.measured_at[:10]} {run.measured_at[11:16]}"
        for run in (comparison.before, after)
        if run.measured_at
    ]
    measured = [f"measured {' and '.join(times)} UTC"] if times else []
    return printable(" · ".join([_devices(after.devices), *machine.versions, *measured]))


def _notes(comparison: Comparison) -> list[str]:
    before, after = comparison.before, comparison.after
    notes = []
    if before.devices != after.devices:
        notes.append(
            f"{_devices(before.devices)} → {_devices(after.devices)}: different devices, so "
            f"speed-ups over {comparison.baseline or 'a common kernel'} are compared, not times"
        )
    elif comparison.basis == "speed-up":
        notes.append(
            f"{_devices(after.devices)}: speed-ups over {comparison.baseline} are compared; they "
            "stay the same when the whole machine slows down"
        )
    else:
        notes.append(f"{_devices(after.devices)}: times are compared")
    own = comparison.baseline_time
    if own is not None:
        notes.append(f"{comparison.baseline} itself, by time: {speed_text(own)}")
    spread = comparison.spread
    notes.append(
        f"spread between runs: {spread.share:.1%} ({spread.source})"
        + (", and a separate one for each kernel" if spread.of_kernels else "")
        if spread.source
        else "spread between runs: not given (--spread), so random differences between runs may be "
        "called faster or slower"
    )
    if smallest := smallest_slowdown(comparison):
        notes.append(smallest)
    # A different version of a library may explain a verdict.
    for each in comparison.differences:
        there = "" if each.environment == HERE else f" of {each.environment}"
        notes.append(f"{each.field}{there}: {each.before or 'none'} → {each.after or 'none'}")
    # A different tolerance can change a verdict although the kernel did not change.
    changed = {(one.before.tolerances, one.after.tolerances) for one in comparison.pairs}
    notes += [
        f"--tolerances: {one or 'default'} → {other or 'default'}"
        for one, other in sorted(changed)
        if one != other
    ]
    for run in (before, after):
        if run.is_cut_off:
            notes.append(f"{run.name} was interrupted: its last row is cut off")
        if run.unreadable:
            unread = first_few(run.unreadable, 3)
            notes.append(f"{run.name} has calls that could not be replayed: {unread}")
    return notes


def _counts(comparison: Comparison) -> Table:
    speed = Counter(each.speed.verdict for each in comparison.pairs if each.speed)
    accuracy = Counter(each.accuracy.verdict for each in comparison.pairs if each.accuracy)
    kernels = Counter(each.speed.verdict for each in comparison.kernels if each.speed)
    lines = [
        ("speed", *(str(speed[word]) for word in SPEED_WORDS)),
        ("accuracy", *(str(accuracy[word]) for word in ACCURACY_WORDS)),
        ("kernels, all calls", *(str(kernels[word]) for word in SPEED_WORDS)),
    ]
    headings = ("rows", "same", "faster / better", "slower / worse", "undecided")
    return Table(f"{counted(len(comparison.pairs), 'row')} in both", headings, tuple(lines))


def _kernels(comparison: Comparison) -> Table:
    """Return the table of changed kernels, with one line for all calls of a kernel."""
    lines = [
        (
            printable(str(each.kernel)),
            str(len(each.pairs)),
            "" if each.speed is None else speed_text(each.speed),
            _counted(each, comparison),
        )
        for each in sorted(comparison.kernels, key=_order)
        if _changes(each.pairs, each.speed)
    ]
    return Table("kernels", ("kernel", "calls", "over all calls", "by call"), tuple(lines))


def _counted(kernel: KernelChange, comparison: Comparison) -> str:
    """Count the calls by their worst change; each call is counted once."""
    words = Counter(_word(pair, comparison) for pair in kernel.pairs)
    return ", ".join(f"{count} {word}" for word, count in words.most_common())


def _word(pair: Pair, comparison: Comparison) -> str:
    if pair.outcome:
        return pair.outcome
    if pair.became_wrong:
        return "wrong"
    if "worse" in pair.changes:
        return "less accurate"
    if pair.speed and pair.speed.verdict == "slow":
        return "slower"
    if any(_undecided(comparison, pair)):
        return "undecided"
    if "better" in pair.changes:
        return "more accurate"
    if pair.speed or pair.accuracy:
        return "faster" if "fast" in pair.changes else "same"
    return "not compared"


def _rows(comparison: Comparison) -> Table:
    lines = [
        (
            printable(str(pair.before.id)),
            _call(pair.before),
            _outcome(pair) or ("" if pair.speed is None else speed_text(pair.speed)),
            "" if pair.accuracy is None else accuracy_text(pair.accuracy),
        )
        for pair in sorted(comparison.pairs, key=_order)
        if pair.changes
    ]
    return Table("rows that changed", ("kernel", "call", "speed", "accuracy"), tuple(lines))


def _outcome(pair: Pair) -> str:
    if not pair.outcome:
        return ""
    reason = pair.before.reason if pair.outcome == "recovered" else pair.after.reason
    text = f"{pair.before.status} → {pair.after.status}: {printable(reason)}"
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"


def _came_and_went(comparison: Comparison) -> Table:
    calls: dict[tuple[str, str], list[str]] = {}
    for word, rows in (("missing", comparison.missing), ("new", comparison.new)):
        for row in rows:
            names = calls.setdefault((word, printable(str(row.id))), [])
            names.append(printable(row.call.name))
    lines = tuple((*key, f"{len(names)}: {first_few(names, 3)}") for key, names in calls.items())
    return Table("only in one run", ("", "kernel", "calls"), lines)


def _call(row: Row) -> str:
    return f"{printable(row.call.name)} ({place(row.call)})" if row.call.module else place(row.call)


def _devices(names: Sequence[str]) -> str:
    return " and ".join(map(printable, names)) or "unknown device"


def _changes(pairs: Sequence[Pair], speed: SpeedChange | None) -> set[str]:
    """Return words for a kernel's changes on single calls and over all of its calls."""
    found = {word for pair in pairs for word in pair.changes}
    return found | ({speed.verdict} & {"slow", "fast"} if speed else set())


def _order(changed: KernelChange | Pair) -> tuple[bool, bool, float]:
    """Return a sort key that puts failures first, then lost accuracy, then large slowdowns."""
    pairs = changed.pairs if isinstance(changed, KernelChange) else [changed]
    changes = _changes(pairs, None)
    ratio = changed.speed.ratio if changed.speed else 1.0
    return (not changes & FAILING, "worse" not in changes, ratio)
