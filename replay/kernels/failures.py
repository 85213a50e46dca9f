"""Status and sentence for a kernel's exception, as shown in its row."""

from __future__ import annotations

import re
import traceback
from pathlib import Path
from typing import NamedTuple

import torch

from attention_replay.errors import Error
from capture.text.printable import printable
from replay.kernels.kernel_names import USER_MODULE
from replay.rows.row import Status

LONGEST_REASON = 500

ADVICE = re.compile(r"\n(Search for `cuda|CUDA kernel errors might).*", re.DOTALL)
"""General advice that PyTorch appends to each CUDA error."""

NEEDED = re.compile(r"[Tt]ried to allocate (?P<needed>[\d.]+ (?:bytes|[KMGT]iB))")
FREE = re.compile(r"total capacity of (?P<all>[\d.]+ \w+) of which (?P<free>[\d.]+ \w+) is free")


class Finding(NamedTuple):
    """Finding about a kernel on a call."""

    status: Status
    reason: str = ""


class ContextLost(Exception):
    """Error for a kernel that made this process's GPU or memory unusable."""

    def __init__(self, reason: str, status: Status = "crash") -> None:
        super().__init__(reason)
        self.status = status


class CannotJudge(Exception):
    """Error for an output or a call that cannot be judged; the message is a whole sentence."""


def classify(error: BaseException) -> Finding:
    """Return the status and one printable line for a kernel's exception, including `SystemExit`.

    A `NotImplementedError` is a refusal of the call: its message is the reason.

    Raises:
        KeyboardInterrupt: the exception is a `KeyboardInterrupt`, which comes from the user.
    """
    if isinstance(error, KeyboardInterrupt):
        raise error
    message, place, is_own = ADVICE.sub("", _message(error)).strip(), *_place(error)
    # A library's long message starts with the cause, so one line is enough. For a user's own code,
    # keep the whole message.
    line = " ".join(message.split()) if is_own else message.partition("\n")[0]
    # Remove escape codes, surrogates and excess length, because a terminal shows the text.
    text = printable(line[:LONGEST_REASON]).strip() or type(error).__name__
    if isinstance(error, CannotJudge | Error):
        return Finding("error", text)
    if isinstance(error, NotImplementedError):
        return Finding("unsupported", text)
    out_of_memory = isinstance(error, torch.OutOfMemoryError | MemoryError)
    if out_of_memory or "not enough memory" in text or "can't allocate memory" in text:
        return Finding("out-of-memory", _shortage(text))
    return Finding("error", f"{type(error).__name__}: {text}{place}")


def without_numbers(sentence: str) -> str:
    """Return a sentence with `#` for each number, to compare sentences about different calls."""
    return re.sub(r"0x[\da-f]+|-?\d[\d.,×e+-]*", "#", sentence)


def _place(error: BaseException) -> tuple[str, bool]:
    """Return the line in a user's kernel where an error passed, and whether that line raised it."""
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
    """Shorten a long message of PyTorch's allocators to the required and the free memory."""
    needed, free = NEEDED.search(text), FREE.search(text)
    if needed is None:
        return text
    amount = _readable(needed["needed"])
    return f"needed {amount}" + (f", {free['free']} of {free['all']} free" if free else "")


def _readable(amount: str) -> str:
    """Format `1610612736 bytes` as `1.5 GiB`."""
    number, unit = amount.split()
    if unit != "bytes":
        return amount
    size = float(number)
    for name in ("bytes", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or name == "TiB":
            break
        size /= 1024
    return f"{size:.4g} {name}"
