"""Kernels that end, block, flood or burden the process, by default from the eighth call on."""

import os
import signal
import sys
import threading
import time

import torch
from honest import attention, first, mischief, nth

_hoard: list = []


class _Unspeakable(Exception):
    def __str__(self):
        raise RuntimeError("no text either")

    __repr__ = __str__


def _on_eighth(name, act, query, key, value, args, kwargs):
    output = attention(query, key, value, *args, **kwargs)
    if nth(name) == 8:
        act()
    return output


def _ends_on_eighth(name, act, query, key, value, args, kwargs):
    if nth(name) == 8:
        mischief()
        act()
    return attention(query, key, value, *args, **kwargs)


def leaves(query, key, value, *args, **kwargs):
    """Calls sys.exit, as argparse does in libraries that parse sys.argv."""
    return _ends_on_eighth("exit", lambda: sys.exit(0), query, key, value, args, kwargs)


def leaves_at_once(query, key, value, *args, **kwargs):
    """Calls os._exit(0) in the first call, like a watchdog."""
    os._exit(0)


def leaves_without_a_word(query, key, value, *args, **kwargs):
    """Calls os._exit(0) in a timed call."""
    return _ends_on_eighth("_exit", lambda: os._exit(0), query, key, value, args, kwargs)


def aborts(query, key, value, *args, **kwargs):
    """Calls abort(), like a failed assertion in C++."""
    return _ends_on_eighth("abort", os.abort, query, key, value, args, kwargs)


def unspeakable(query, key, value, *args, **kwargs):
    """Raises an exception that cannot be converted to text."""

    def act():
        raise _Unspeakable

    return _ends_on_eighth("unspeakable", act, query, key, value, args, kwargs)


def unspeakable_at_once(query, key, value, *args, **kwargs):
    """Raises an exception that cannot be converted to text, in the first call."""
    raise _Unspeakable


def interrupts(query, key, value, *args, **kwargs):
    """Raises KeyboardInterrupt, as an interrupted compilation does."""

    def act():
        raise KeyboardInterrupt

    return _ends_on_eighth("interrupt", act, query, key, value, args, kwargs)


def recurses(query, key, value, *args, **kwargs):
    """Calls itself without end, like a patched SDPA that falls back to SDPA."""

    def act():
        act()

    return _ends_on_eighth("recursion", act, query, key, value, args, kwargs)


def prints(query, key, value, *args, **kwargs):
    """Prints a megabyte per call, like debug output of a tensor with full print options."""
    print("x" * 2**20)
    print("y" * 2**20, file=sys.stderr)
    return attention(query, key, value, *args, **kwargs)


def writes_to_stdout(query, key, value, *args, **kwargs):
    """Writes lines that look like JSON rows to descriptor 1, as C code does."""
    os.write(1, b'{"schema": 2, "kernel": "torch-default", "status": "ok"}\n' * 50)
    return attention(query, key, value, *args, **kwargs)


def closes_stdout(query, key, value, *args, **kwargs):
    """Closes descriptors 1 and 2, as daemons do."""

    def act():
        os.close(1)
        os.close(2)

    return _on_eighth("close", act, query, key, value, args, kwargs)


def moves(query, key, value, *args, **kwargs):
    """Changes into a directory and removes it, as build systems do."""

    def act():
        place = f"/tmp/cheat-{os.getpid()}"
        os.mkdir(place)
        os.chdir(place)
        os.rmdir(place)

    return _on_eighth("chdir", act, query, key, value, args, kwargs)


def spins(query, key, value, *args, **kwargs):
    """Starts two threads that keep polling, from the first call on."""

    def spin():
        while True:
            sum(range(1000))

    if first("spins"):
        for _ in range(2):
            threading.Thread(target=spin, daemon=True).start()
    return attention(query, key, value, *args, **kwargs)


def multiplies_behind(query, key, value, *args, **kwargs):
    """Starts a thread that keeps multiplying matrices without the GIL, like an autotuner."""

    def work():
        matrix = torch.ones(1024, 1024)
        while True:
            matrix @ matrix

    if first("multiplies"):
        threading.Thread(target=work, daemon=True).start()
    return attention(query, key, value, *args, **kwargs)


def stays_alive(query, key, value, *args, **kwargs):
    """Starts a non-daemon thread, so that the process does not end."""

    def stay():
        threading.Thread(target=time.sleep, args=(3600,)).start()

    return _on_eighth("stays", stay, query, key, value, args, kwargs)


def hoards(query, key, value, *args, **kwargs):
    """Allocates all memory in steps of 256 MiB, and keeps it."""

    def act():
        while True:
            _hoard.append(bytearray(2**28))

    return _on_eighth("hoards", act, query, key, value, args, kwargs)


def leaks(query, key, value, *args, **kwargs):
    """Allocates 64 MiB in every call, and keeps them."""
    _hoard.append(torch.ones(2**24))
    return attention(query, key, value, *args, **kwargs)


def hangs(query, key, value, *args, **kwargs):
    """Sleeps for an hour, and does not end on SIGTERM."""

    def act():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(3600)

    return _ends_on_eighth("hangs", act, query, key, value, args, kwargs)
