"""What a kernel's exception says: a status and a sentence for its row."""

from __future__ import annotations

import re
import traceback
from pathlib import Path
from typing import NamedTuple

import torch

from capture.text.printable import printable
from replay.kernels.kernel_names import USER_MODULE
from replay.rows.row import Status

LONGEST_REASON = 500

NEEDED = re.compile(r"[Tt]ried to allocate (?P<needed>[\d.]+ (?:bytes|[KMGT]iB))")
FREE = re.compile(r"total capacity of (?P<all>[\d.]+ \w+) of which (?P<free>[\d.]+ \w+) is free")


class Finding(NamedTuple):
    """What has been found about a kernel on a call so far."""

    status: Status
    reason: str = ""


class ContextLost(Exception):
    """A kernel left this process unusable: its GPU refuses work, or its memory is gone."""

    def __init__(self, reason: str, status: Status = "crash") -> None:
        super().__init__(reason)
        self.status = status


class CannotJudge(Exception):
    """The judge failed, with an output or with a call; its message is the whole sentence."""


def classify(error: BaseException) -> Finding:
    """The status and one printable line of what a kernel raised, be it `SystemExit`.

    Raises:
        KeyboardInterrupt: that is what it was, and it is the user's.
    """
    if isinstance(error, KeyboardInterrupt):
        raise error
    said, place, is_own = _message(error).strip(), *_place(error)
    # A library's story is long, and begins with what counts; the author of a kernel wants all.
    line = " ".join(said.split()) if is_own else said.partition("\n")[0]
    # It is shown in a terminal: no escape codes, no surrogates, no megabytes.
    text = printable(line[:LONGEST_REASON]).strip() or type(error).__name__
    if isinstance(error, CannotJudge):
        return Finding("error", text)
    out_of_memory = isinstance(error, torch.OutOfMemoryError | MemoryError)
    if out_of_memory or "not enough memory" in text or "can't allocate memory" in text:
        return Finding("out-of-memory", _shortage(text))
    return Finding("error", f"{type(error).__name__}: {text}{place}")


def _place(error: BaseException) -> tuple[str, bool]:
    """Where in a user's `file.py:function` an error came up, and whether that raised it."""
    place, is_own = "", False
    for frame, line in traceback.walk_tb(error.__traceback__):
        is_own = str(frame.f_globals.get("__name__")).startswith(USER_MODULE)
        if is_own:
            place = f" ({printable(Path(frame.f_code.co_filename).name)}, line {line})"
    return place, is_own


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException as another:
        return f"no message, since asking for it raises {type(another).__name__}"


def _shortage(text: str) -> str:
    """What was needed and what was free, from the long message of PyTorch's allocators."""
    needed, free = NEEDED.search(text), FREE.search(text)
    if needed is None:
        return text
    amount = _readable(needed["needed"])
    return f"needed {amount}" + (f", {free['free']} of {free['all']} free" if free else "")


def _readable(amount: str) -> str:
    """`1.5 GiB` for `1610612736 bytes`."""
    number, unit = amount.split()
    if unit != "bytes":
        return amount
    size = float(number)
    for name in ("bytes", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or name == "TiB":
            break
        size /= 1024
    return f"{size:.4g} {name}"
