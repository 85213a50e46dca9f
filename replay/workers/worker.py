"""The child process: answers a parent's requests, one a line.

Every line is JSON. Before anything that could kill this process a line names what it is at, so that
the parent knows whom to blame. Tensors never travel: a request names a file or a random shape.
Stdout and stderr belong to the kernels; the parent keeps what they print. `replay.workers.process`
starts it, with the two ends of pipes that it talks through, and names the module that answers.
"""

from __future__ import annotations

import functools
import gc
import importlib
import json
import os
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import fields
from typing import Any, TextIO

from attention_replay.errors import Error
from replay.isolation.shared_streams import keep_open
from replay.kernels.failures import ContextLost, classify

Say = Callable[..., None]
"""`say(name=value, …)` sends one line to the parent; dataclasses as objects of their fields."""


Hear = Callable[[], dict[str, Any]]
"""The parent's next line, waited for."""


def main(requests_fd: int, replies_fd: int, handler: str) -> None:
    """Serve until the parent closes its end. Nothing looks for garbage until all is imported.

    Args:
        handler: a module with `handle(request, say, hear)`, which answers one request.
    """
    for descriptor in (requests_fd, replies_fd):
        os.set_inheritable(descriptor, False)  # a compiler that outlives us must not hold them
    os.register_at_fork(after_in_child=functools.partial(_hang_up, requests_fd, replies_fd))
    threading.Thread(target=_end_with_parent, args=(replies_fd,), daemon=True).start()
    requests = os.fdopen(requests_fd, "r")
    replies = os.fdopen(replies_fd, "w", buffering=1)
    say = functools.partial(_say, replies)
    for stream in (sys.stdout, sys.stderr):
        keep_open(stream)
    handle = importlib.import_module(handler).handle
    gc.freeze()  # no search for garbage goes through PyTorch's half a million objects
    gc.enable()

    def next_line() -> str:
        os.set_blocking(requests_fd, True)  # a kernel may have changed that
        return requests.readline()

    def hear() -> dict[str, Any]:
        line = next_line()
        if not line:  # the parent is gone, or this is a copy that a kernel made
            os._exit(0)
        reply: dict[str, Any] = json.loads(line)
        return reply

    say(ready=True)
    while line := next_line():
        try:
            handle(json.loads(line), say, hear)
        except ContextLost as error:
            say(lost=str(error), status=error.status)
            continue
        except Exception as error:  # a full disk, or a defect of ours: no kernel's fault
            failed = str(error) if isinstance(error, Error) else classify(error)[1]
            say(failed=failed, traceback=traceback.format_exc())
        say(done=True)


def _hang_up(*descriptors: int) -> None:
    """A copy of this process that a kernel made, and that goes on, must not talk to our parent."""
    nobody = os.open(os.devnull, os.O_RDWR)
    for descriptor in descriptors:
        os.dup2(nobody, descriptor, inheritable=False)
    os.close(nobody)


def _end_with_parent(replies_fd: int) -> None:
    """A parent that was killed cannot end us, and a kernel that hangs would stay for ever."""
    reader = select.poll()
    reader.register(replies_fd, 0)  # an error is always reported: that nobody reads any more
    reader.poll()
    os.killpg(os.getpgrp(), signal.SIGKILL)


def _say(replies: TextIO, **message: Any) -> None:
    os.set_blocking(replies.fileno(), True)
    replies.write(line_of(message))


def line_of(message: dict[str, Any]) -> str:
    """What is sent; dataclasses are objects of their fields."""
    return json.dumps(message, default=_fields_of) + "\n"


def _fields_of(record: Any) -> dict[str, Any]:
    """Those `asdict` has, which copies all in them as well: thousands of errors of a row."""
    return {each.name: getattr(record, each.name) for each in fields(record)}
