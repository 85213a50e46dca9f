"""Table of a dataset in a notebook."""

from __future__ import annotations

from collections.abc import Sequence

from capture.storage.call_file import FileEntry
from capture.text.html_table import html_table

HEADINGS = ("call", "model", "step", "phase", "module", "B×H×S×D", "dtype", "mask", "MB")


def dataset_html(entries: Sequence[FileEntry], above: Sequence[str]) -> str:
    """Return an HTML table with one line per recorded call, without loading the calls.

    Args:
        above: sentences to put above the table.
    """
    lines = [_line(entry) for entry in entries]
    return html_table(HEADINGS, lines, [*above, *filter(None, [steps_note(entries)])])


def steps_note(entries: Sequence[FileEntry]) -> str:
    """Return what the steps of old recordings are; empty for other recordings."""
    is_old = any(entry.origin.forward_index is None for entry in entries)
    return "the step column counts forwards, not steps" if is_old else ""


def _line(entry: FileEntry) -> tuple[object, ...]:
    origin, header = entry.origin, entry.header
    mask = "causal" if header.is_causal else ""
    if "attn_mask" in header.layouts:
        mask = header.mask_structure or "mask"
    return (
        origin.call_index,
        origin.model,
        origin.step,
        origin.phase,
        origin.module,
        str(header.shape),
        header.dtype,
        mask,
        entry.nbytes / 1e6,
    )
