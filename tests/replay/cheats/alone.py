"""Cheats that disturb their process, the replay or other kernels. Each gets a process of its own.

`run.py` copies this file for each cheat, because the kernels of one file share a process.
"""

import json
import os
import subprocess
import sys
from dataclasses import replace

from honest import at, local


def _change_rows(change):
    """Let a function change the rows that this process sends."""
    from replay.bench import runner

    real = runner.make_row
    runner.make_row = lambda *args, **kwargs: change(real(*args, **kwargs))


def _claim(factor, **fields):
    """Divide the samples in this process's rows by a factor, and set other fields."""
    from replay.timing.statistics import summarize

    def change(row):
        if row.time_ms is None:
            return row
        samples = [sample / factor for sample in row.time_ms.samples]
        return replace(row, time_ms=summarize(samples), **fields)

    _change_rows(change)


@at(1)
def other_samples():
    """Says the true median and samples that are twenty times as short, and a speed-up."""

    def change(row):
        if row.time_ms is None:
            return row
        samples = tuple(sample / 20 for sample in row.time_ms.samples)
        return replace(row, time_ms=replace(row.time_ms, samples=samples))

    _change_rows(change)


@at(1)
def of_known_kernels():
    """Says that it is a known kernel, which launches limit."""
    _claim(20, process="", host_ms=100.0)


@at(1)
def blocks_of_two_calls():
    """Runs many blocks of two calls, whose time is mostly noise."""
    from replay.bench import output_check

    output_check.calls_of_block = lambda *_: 2
    output_check.Blocks.settle = lambda blocks, *_: len(blocks.ms) > 300
    _claim(8)


@at(1)
def empty_block():
    """Writes nothing into the memory of a block, in no time."""
    from replay.bench import output_check

    output_check.run_block = lambda *_: ""
    _claim(20)


@at(1)
def rows_of_neighbours():
    """Sends rows of other kernels."""
    say = local("say")

    def change(row):
        for name in os.environ["CHEATS_NEIGHBOURS"].split(","):
            say(row=replace(row, kernel=name, status="inaccurate", reason="slandered"))
        return row

    _change_rows(change)


@at(1)
def call_is_unreadable():
    """Says that no process can read the call."""
    local("say")(unreadable="by no one")


@at(1)
def another_call():
    """Makes the judge expect another call."""
    text = json.dumps(local("request")["workload"]).replace('"seed": 0', '"seed": 77')
    local("say")(judge={"do": "expect", "workload": json.loads(text)})


@at(1)
def blames_a_neighbour():
    """Says that another kernel runs, and ends its process."""
    local("say")(at="torch-math")
    os._exit(3)


@at(1)
def facts_of_another_call():
    """Says that it runs another call, on another machine."""
    loaded = local("loaded")
    facts, machine = replace(loaded.facts, name="other"), replace(loaded.machine, device="other")
    local("say")(call=facts, machine=machine, baseline="torch-math")


@at(1)
def continued_by_the_system():
    """Leaves a process that burns processor time; a look at its children continues it."""
    program = """
import ctypes, fcntl, os, time
system, pid, end = ctypes.CDLL(None), os.getpid(), time.time() + 60
watch, place = system.inotify_init(), f"/proc/{pid}/task/{pid}/children"
kept = open(place)
system.inotify_add_watch(watch, place.encode(), 0x3B)  # any access
fcntl.fcntl(watch, 10, 18)  # F_SETSIG, SIGCONT
fcntl.fcntl(watch, fcntl.F_SETOWN, pid)
fcntl.fcntl(watch, fcntl.F_SETFL, os.O_NONBLOCK | os.O_ASYNC)
while time.time() < end:
    try: os.read(watch, 4096)
    except BlockingIOError: pass
"""
    subprocess.Popen([sys.executable, "-S", "-E", "-c", program])
