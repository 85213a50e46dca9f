"""Writes a benchmark of recorded calls for the command `kernels benchmark` of the Hub's kernels.

The command runs the classes in `benchmarks/benchmark*.py` of a kernel's repository
(https://huggingface.co/docs/kernels/cli-benchmark). `benchmark_template.py` is the file.
"""

from __future__ import annotations

import inspect
import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from capture.call.attention_variant import PLAIN, VARIANT_TENSORS
from capture.errors import CaptureError
from capture.storage.call_file import FileEntry
from capture.storage.header import CallHeader
from capture.storage.standalone import restored
from capture.storage.upload import HubDataset

_IMPORT = "\nfrom capture.storage.standalone import restored\n"
"""Line of the template that the function's own source replaces."""


@dataclass(frozen=True)
class BenchmarkFile:
    """Text of a benchmark, and what it leaves out."""

    text: str
    calls: int
    left_out: str
    """Clause about the calls that FlashAttention's arguments cannot express; empty if none."""


def check_name(path: Path) -> None:
    """Raise CaptureError if `kernels benchmark` would not find a file of this name."""
    if not re.fullmatch(r"benchmark.*\.py", path.name):
        raise CaptureError(
            f"`kernels benchmark` runs benchmarks/benchmark*.py, but not {path.name}: name it "
            "benchmark_recorded.py"
        )


def benchmark_file(
    entries: Sequence[FileEntry], place: Path | HubDataset, path: Path
) -> BenchmarkFile:
    """Return a benchmark of these calls.

    Args:
        place: directory or dataset of the Hub with the calls' files.
        path: file that the benchmark will be written to.

    Raises:
        CaptureError: no call can be expressed by FlashAttention's arguments.
    """
    reasons = {entry.path.stem: _beyond(entry.header) for entry in entries}
    calls = [name for name, reason in reasons.items() if not reason]
    counts = Counter(reason for reason in reasons.values() if reason)
    left_out = ", ".join(f"{count} {reason}" for reason, count in counts.items())
    if not calls:
        raise CaptureError(
            f"no call can be expressed by the arguments of flash_attn_func ({left_out}): record "
            "others, or leave out `benchmark=`"
        )
    if isinstance(place, Path):
        place = HubDataset("", None, os.path.relpath(place, path.absolute().parent))
    constants = {
        "REPOSITORY": place.repository,
        "REVISION": place.revision,
        "FOLDER": place.folder,
        "CALLS": calls,
    }
    text = Path(__file__).with_name("benchmark_template.py").read_text("utf-8")
    text = text.replace(_IMPORT, "")
    for name, value in constants.items():
        line = re.compile(rf"^({name}\b[^=\n]* = ).*$", re.MULTILINE)
        before, declared, after = line.split(text, maxsplit=1)
        text = f"{before}{declared}{value!r}{after}"
    return BenchmarkFile(f"{text}\n\n{inspect.getsource(restored)}", len(calls), left_out)


def _beyond(header: CallHeader) -> str:
    """Return what FlashAttention's plain function cannot express; empty if it can."""
    if "attn_mask" in header.layouts:
        return "with a mask"
    if header.variant != PLAIN or header.value_in_key or header.layouts.keys() & VARIANT_TENSORS:
        return "with options that SDPA does not have"
    if header.dropout_p:
        return "with dropout"
    # FlashAttention aligns the diagonal with the last key, SDPA with the first.
    if header.is_causal and header.shape.q_len != header.shape.kv_len:
        return "causal with fewer queries than keys"
    return ""
