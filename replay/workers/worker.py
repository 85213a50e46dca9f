"""The child process: answers a parent's requests, one a line.

Every line is JSON. Before anything that could kill this process a line names what it is at, so that
the parent knows whom to blame. Tensors never travel: a request names a file or a random shape.
Stdout and stderr belong to the kernels; the parent keeps what they print. `replay.workers.process`
starts it, with the two ends of pipes that it talks through, and names the module that answers.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import select
import shutil
import signal
import threading
import traceback
from collections.abc import Callable
from typing import Any, TextIO

from replay.bench.failures import ContextLost, classify

Say = Callable[..., None]
"""`say(name=value, …)` sends one line to the parent."""

LEFTOVERS: set[str] = set()
"""Directories of a parent that was killed, which nobody else would remove."""

Hear = Callable[[], dict[str, Any]]
"""The parent's next line, waited for."""


def main(requests_fd: int, replies_fd: int, handler: str) -> None:
    """Serve until the parent closes its end.

    Args:
        handler: a module with `handle(request, say, hear)`, which answers one request.
    """
    for descriptor in (requests_fd, replies_fd):
        os.set_inheritable(descriptor, False)  # a compiler that outlives us must not hold them
    threading.Thread(target=_end_with_parent, args=(replies_fd,), daemon=True).start()
    requests = os.fdopen(requests_fd, "r")
    replies = os.fdopen(replies_fd, "w", buffering=1)
    say = functools.partial(_say, replies)
    handle = importlib.import_module(handler).handle

    def hear() -> dict[str, Any]:
        heard: dict[str, Any] = json.loads(requests.readline())
        return heard

    say(ready=True)
    while line := requests.readline():
        try:
            handle(json.loads(line), say, hear)
        except ContextLost as error:
            say(lost=str(error), status=error.status)
            continue
        except Exception as error:  # a full disk, or a defect of ours: no kernel's fault
            say(failed=classify(error)[1], traceback=traceback.format_exc())
        say(done=True)


def _end_with_parent(replies_fd: int) -> None:
    """A parent that was killed cannot end us, and a kernel that hangs would stay for ever."""
    parent = select.poll()
    parent.register(replies_fd, 0)  # an error is always reported: that nobody reads any more
    parent.poll()
    for directory in LEFTOVERS:
        shutil.rmtree(directory, ignore_errors=True)
    os.killpg(os.getpgrp(), signal.SIGKILL)


def _say(replies: TextIO, **message: Any) -> None:
    replies.write(json.dumps(message) + "\n")
