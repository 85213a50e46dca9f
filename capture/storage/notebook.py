"""The table that a notebook shows for a dataset."""

from __future__ import annotations

from collections.abc import Sequence

from capture.storage.call_file import FileEntry
from capture.text.html_table import html_table

HEADINGS = ("call", "model", "step", "phase", "module", "B×H×S×D", "dtype", "mask", "MB")


def dataset_html(entries: Sequence[FileEntry], above: Sequence[str]) -> str:
    """Return a table in HTML with a line per recorded call, without loading any.

    Args:
        above: sentences to put above it.
    """
    return html_table(HEADINGS, [_line(entry) for entry in entries], above)


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
