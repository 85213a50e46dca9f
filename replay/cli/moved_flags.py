"""Former flags of `replay`, each with the verb or option that replaced it. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable

REPLACEMENTS = {
    "--random": "replay random …",
    "--suite": "replay suite NAME …",
    "--e2e": "replay verify --dir DIR …",
    "--plan": "replay plan --dir DIR --out FILE …",
    "--selftest": "replay selftest …",
    "--list-kernels": "replay kernels …",
    "--watch": "replay watch …",
    "--ncu": "replay profile …",
    "--once": "replay profile … --once",
    "--budget": "replay plan --dir DIR --out FILE --budget METRIC=X",
    "--use-plan": "replay verify --dir DIR --plan FILE",
    "--any-device": "replay verify --dir DIR --plan FILE --any-device",
    "--e2e-json": "replay verify --dir DIR --checks FILE",
    "--model-rounds": "replay verify --dir DIR --model-rounds N",
    "--text": "replay verify --dir DIR --text FILE",
    "--trust-code": "replay verify --dir DIR --trust-code",
    "--csv": "replay report ROWS --csv FILE",
    "--plot": "replay report ROWS --plot DIR",
    "--compare-to": "replay compare BEFORE AFTER",
    "--spread": "replay compare BEFORE AFTER --spread WHAT",
    "--fail-on": "replay compare BEFORE AFTER --fail-on A,B",
    "--env-file": "--env FILE.toml",
    "--compare-stats": "--metric time,accuracy,stats",
    "--resources": "--metric time,accuracy,resources",
    "--keep": "--kernels 'NAME[keep=FRACTION]'",
    "--page-size": "--kernels 'NAME[page_size=N]'",
    "--variants": "--kernels 'GLOB*', which matches variants too",
}


def where_it_moved(arguments: Iterable[str]) -> str:
    """Return a sentence about the first former flag among the arguments; empty without one."""
    for argument in arguments:
        flag = argument.partition("=")[0]
        if flag in REPLACEMENTS:
            return f"unknown option {flag}: use `{REPLACEMENTS[flag]}`"
    return ""
