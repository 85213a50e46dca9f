"""Prints the contents of a dataset, and the results of file checks, as tables."""

from __future__ import annotations

import math

from rich.console import Console
from rich.table import Table
from rich.text import Text

from capture.call.attention_call import Origin
from capture.call.head_ranges import ranges
from capture.call.statistics import CallStatistics, call_statistics, mean
from capture.cli.file_checks import FileCheck
from capture.errors import DatasetError
from capture.storage.call_file import FileEntry
from capture.storage.capture_record import CaptureRecord
from capture.storage.dataset import Dataset
from capture.storage.header_text import mask_text, strides_text
from capture.storage.notebook import steps_note
from capture.text.counted import counted, human_bytes
from capture.text.printable import printable


def show(dataset: Dataset, console: Console) -> None:
    """Print the origin of each capture, and one line per recorded call."""
    for note in filter(None, [dataset.note, *(str(each.error) for each in dataset.damaged)]):
        console.print(_text(f"note: {note}", "yellow"))
    by_model: dict[str, list[FileEntry]] = {}
    for entry in dataset.entries:
        by_model.setdefault(entry.origin.model, []).append(entry)
    for capture in dataset.captures:
        entries = by_model.get(capture.model, [])
        console.print(_text(capture.model, "bold") + _text(f" · {_summary(capture, entries)}"))
        for invalid in capture.invalid:
            console.print(_text(f"invalid call: {invalid}", "yellow"))
        if capture.first_nonfinite is not None:
            console.print(_text(str(capture.first_nonfinite), "yellow"))
        for kind, alike in _grouped(entries).items():
            console.print("\n", _text(kind, "cyan"), sep="")
            console.print(_calls(alike))
        console.print()


STATISTICS = (
    "outliers: channels of K over 4 times as large as the head's median channel, in the head with "
    "the most · K mean/dev.: mean of K, which smoothing removes, relative to its deviation · "
    "entropy of the attention weights: 1 is uniform · largest weight of a query · top 1 %: total "
    "weight of the heaviest keys · only queries that see at least 16 keys count"
)


def show_statistics(dataset: Dataset, console: Console) -> None:
    """Print, by layer and phase, statistics of how difficult the calls are for a kernel."""
    found: dict[tuple[str, str], dict[str, list[CallStatistics]]] = {}
    with Console(stderr=True).status("") as status:
        for number, entry in enumerate(dataset.entries, start=1):
            status.update(Text(f"call {number} of {len(dataset.entries)}"))
            origin = entry.origin
            try:
                statistics = call_statistics(entry.load())
            except DatasetError as error:
                console.print(_text(f"note: {error}", "yellow"))
                continue
            layers = found.setdefault((origin.model, origin.phase), {})
            layers.setdefault(origin.module, []).append(statistics)
    for (model, phase), layers in found.items():
        console.print(_text(model, "bold") + _text(f" · {phase}"))
        table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0))
        table.add_column("module", overflow="fold")
        for heading in ("calls", "outliers", "K mean/dev.", "entropy", "largest", "top 1 %"):
            table.add_column(heading, justify="right", no_wrap=True)
        for module, calls in layers.items():
            means = mean(calls)
            figures = (means.key_offset, means.entropy, means.largest, means.top_mass)
            shown = (_figure(figure, ".3f") for figure in figures)
            outliers = _figure(means.outlier_channels, ".0f")
            table.add_row(_text(module or "-"), str(len(calls)), outliers, *shown)
        console.print(table)
        console.print()
    console.print(Text(STATISTICS, style="dim"))


def _figure(value: float, form: str) -> str:
    """Format a number, or a dash for NaN."""
    return "-" if math.isnan(value) else format(value, form)


def _calls(entries: list[FileEntry]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0))
    table.add_column("call", no_wrap=True)
    table.add_column("step", justify="right")
    table.add_column("B×H×S×D", no_wrap=True)
    table.add_column("size", justify="right", no_wrap=True)
    by_difficulty = any(entry.origin.difficulty is not None for entry in entries)
    if by_difficulty:
        table.add_column("difficulty", justify="right", no_wrap=True)
    table.add_column("module", overflow="fold")
    for entry in entries:
        origin = entry.origin
        cells = [str(origin.step), str(entry.header.shape)]
        cells.append(human_bytes(entry.nbytes))
        if by_difficulty:
            cells.append("-" if origin.difficulty is None else f"{origin.difficulty:.2%}")
        module = _text(origin.module)
        if origin.nonfinite:
            module += _text(f" ({origin.nonfinite})", "yellow")
        if origin.derived:
            module += _text(f" (derived: {origin.derived})", "yellow")
        table.add_row(_text(entry.path.stem), *cells, module)
    return table


def _grouped(entries: list[FileEntry]) -> dict[str, list[FileEntry]]:
    """Group entries by phase, dtype, mask and strides, so that lines need not repeat these."""
    groups: dict[str, list[FileEntry]] = {}
    for entry in entries:
        header = entry.header
        words = (entry.origin.phase, header.dtype, mask_text(header), strides_text(header))
        kind = " · ".join(words)
        groups.setdefault(kind, []).append(entry)
    return groups


def show_file_checks(checks: list[FileCheck], console: Console) -> None:
    """Print the results of `check_files`, one line per file."""
    for check in checks:
        mark = Text("ok   ", style="green") if check.good else Text("FAIL ", style="bold red")
        console.print(mark + _text(f"{check.path.name}  {check.text}", "default"), soft_wrap=True)


def _text(text: str, style: str = "") -> Text:
    """Convert untrusted text of a recording, without its markup and control characters."""
    return Text(printable(text), style=style)


def _summary(capture: CaptureRecord, entries: list[FileEntry]) -> str:
    calls = counted(len(entries), "call")
    if capture.calls_seen:
        calls = f"{len(entries):,} of {counted(capture.calls_seen, 'call')}"
    size = human_bytes(sum(entry.nbytes for entry in entries))
    parts = [f"{calls}, {size}", f"weights: {capture.weights}"]
    if capture.device:
        parts.append(capture.device)
    if capture.most_gain:
        parts.append(capture.most_gain)
    if capture.heads:
        parts.append(f"heads {capture.heads} of each call")
    if parts_of := sorted({_part(entry.origin) for entry in entries if entry.origin.split}):
        parts.append(" and ".join(parts_of))
    if with_gradients := sum("grad_output" in entry.header.layouts for entry in entries):
        parts.append(f"gradients of {counted(with_gradients, 'call')}")
    parts += filter(None, [capture.left_out, steps_note(entries)])
    if not capture.complete:
        parts.append("incomplete: interrupted, or calls or the manifest were lost")
    return " · ".join(parts)


def _part(origin: Origin) -> str:
    """Describe the part of each call that a rank recorded: `heads 4-7, split over ranks 0-1`."""
    of_whole = f"{origin.split} {origin.heads}".strip() if origin.split == "heads" else origin.split
    return f"{of_whole}, split over ranks {ranges(tuple(sorted(origin.split_ranks)))}"
