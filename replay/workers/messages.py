"""Messages of child processes, as lines of JSON, and their only reader.

A kernel in a child can find the pipe and write lines into it. So every line begins with a token
that the parent drew and sent with its request. A kernel that searches memory can find the token,
so the parent also checks the type of every field, and the child ends with the first wrong one.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any, Protocol

from capture.storage.json_data import shown, typed
from capture.text.printable import printable

_OBJECT = dict[str, Any]
_TEXT = str | None

FIELDS: dict[str, Any] = {
    # of every child
    **dict.fromkeys(("answers", "ready", "works", "done"), bool),
    **dict.fromkeys(("at", "lost", "status", "failed", "traceback", "unreadable"), str),
    # about kernels
    **{"probed": str, "reason": _TEXT, "version": str, "install": str},
    **{"called": str, "first_call_ms": float},
    **{"call": _OBJECT, "machine": _OBJECT, "baseline": str, "row": _OBJECT, "judge": _OBJECT},
    **{"rounds": int, "taken": bool, "enough": bool},
    # of the judge
    **{"ms": Any, "expecting": bool, "opened": bool, "judged": Any, "memory": Any},
    **{"seconds": float, "output_bytes": int, "wrong": str, "other_share": Any},
    # of a model, and of the doctor
    **{"refused": str, "built": _OBJECT, "ran": _OBJECT, "counted": _OBJECT},
    **{"failed_run": dict[str, str], "healthy": str, "origin": _OBJECT, "examined": _OBJECT | None},
    **{"untried": str, "agreed": _OBJECT},
}
"""Fields of messages, with their types."""


class _Child(Protocol):
    def broken(self, reason: str) -> Exception: ...


def line_of(message: dict[str, Any], token: str = "") -> str:
    """Return a message as a line of JSON, with dataclasses as objects."""
    return f"{token}{json.dumps(message, default=vars)}\n"


def read(line: bytes, token: str) -> dict[str, Any]:
    """Return the message of a line.

    Raises:
        ValueError: the line lacks the token or is not a message; the text gives the reason.
    """
    if not line.startswith(token.encode()):
        raise ValueError("sent an invalid message; its kernel may have written to the pipe")
    try:
        message = json.loads(line[len(token) :])
    except RecursionError as error:
        raise ValueError("sent a message that is nested too deeply") from error
    if not isinstance(message, dict) or not message:
        raise ValueError(f"sent {shown(message)} as a message")
    for name, value in message.items():
        if name not in FIELDS:
            raise ValueError(f"sent a message with a field {shown(name)}")
        typed(FIELDS[name], value, name)
    return message


@contextlib.contextmanager
def reading(child: _Child) -> Iterator[None]:
    """End the child if this block finds that its message is invalid.

    Raises:
        Died: the message is invalid.
    """
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        why = f"{type(error).__name__}: {error}"
        raise child.broken(printable(f"an invalid message: {why}")) from error
