"""Former flags of `replay` that are now verbs, or options of a verb. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

VERBS = {
    "--random": "replay random …",
    "--suite": "replay suite NAME …",
    "--e2e": "replay verify --dir DIR …",
    "--plan": "replay plan --dir DIR --out FILE …",
    "--selftest": "replay selftest …",
    "--list-kernels": "replay kernels …",
    "--watch": "replay watch …",
    "--ncu": "replay profile …",
    "--once": "replay profile … --once",
}
"""Verb that replaces each flag."""

OPTIONS = {
    **dict.fromkeys(("--budget",), "replay plan --dir DIR --out FILE --budget METRIC=X"),
    **dict.fromkeys(
        ("--use-plan", "--any-device"), "replay verify --dir DIR --plan FILE [--any-device]"
    ),
    "--e2e-json": "replay verify --dir DIR --checks FILE",
    "--model-rounds": "replay verify --dir DIR --model-rounds N",
    "--text": "replay verify --dir DIR --text FILE",
    "--trust-code": "replay verify --dir DIR --trust-code",
    "--plot": "replay report ROWS --plot DIR",
    **dict.fromkeys(
        ("--compare-to", "--spread", "--fail-on"),
        "replay compare BEFORE AFTER [--spread WHAT] [--fail-on A,B]",
    ),
    "--env-file": "--env FILE.toml",
    "--compare-stats": "--metric time,accuracy,stats",
    "--resources": "--metric time,accuracy,resources",
    "--keep": "--kernels 'NAME[keep=FRACTION]'",
    "--page-size": "--kernels 'NAME[page_size=N]'",
    "--variants": "--kernels 'GLOB*', which matches variants too",
}
"""Command or option that replaces each option."""


def where_it_moved(given: Sequence[str]) -> str:
    """Return a sentence about the first flag that has moved; empty if there is none."""
    for argument in given[: given.index("--")] if "--" in given else given:
        flag = argument.partition("=")[0]
        if flag in VERBS:
            return f"{flag} is now a verb: use `{VERBS[flag]}`"
        if flag in OPTIONS:
            return f"{flag} has moved: use `{OPTIONS[flag]}`"
    return ""
