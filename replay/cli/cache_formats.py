"""`replay cache-formats`: which layers bear which number format of the cache."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from replay.api.cache_formats import cache_formats
from replay.api.call_choices import RecordedCalls
from replay.api.chosen_device import check_name
from replay.api.messages import say
from replay.cli.files import check_files, write_and_print
from replay.cli.shared_options import VerbParser
from replay.cli.stdout import reserved_stdout

if TYPE_CHECKING:
    from replay.diagnosis.cache_tables import CacheErrors

EXAMPLES = """\
  replay cache-formats --dir captured_inputs --budget relative_l1=0.02
  replay cache-formats --dir captured_inputs --formats fp8,fp8-head,int4-group-rotated
"""


def parser() -> VerbParser:
    """Build the parser of `replay cache-formats`."""
    command = VerbParser(
        "cache-formats",
        "Round recorded keys and values as a cache would store them, and show the error of the\n"
        "exact attention over them, by layer: which layers bear an 8-bit or 4-bit cache. Calls\n"
        "that read no cache, of denoisers and encoders, are left out unless --call names them.",
        EXAMPLES,
    )
    command.add("--dir", "--call")
    command.add_argument(
        "--formats",
        metavar="A,B",
        help="bf16; fp8, fp8-tensor, fp8-head, fp8-token (what shares a scale); int8-token, "
        "int8-token-truncated; int4-group; each also with -rotated (default: all of these, and "
        "int4-group-rotated)",
    )
    command.add_argument(
        "--budget",
        metavar="METRIC=X",
        help="largest error of a layer: cosine, relative_l1 or rmse; names the layers to keep in "
        "16 bits, and vLLM's flags (default: none)",
    )
    command.add("--device")
    command.add("--json", help="write the errors as JSON (- for stdout)")
    command.add_common()
    return command


def run(arguments: argparse.Namespace) -> int:
    """Compute the errors, and print and write them.

    Returns:
        1 if no call has errors, 0 otherwise.

    Raises:
        Error: an argument cannot be used.
    """
    check_files(arguments)
    check_name(arguments.device)
    RecordedCalls(arguments.dir, arguments.call).check()
    with reserved_stdout():
        found = cache_formats(
            arguments.dir,
            arguments.formats,
            calls=arguments.call,
            budget=arguments.budget,
            device=arguments.device,
            progress=not arguments.quiet,
        )
    write_and_print(arguments.json, _plain(found), found)
    calls: dict[str, list[str]] = {}
    for name, reason in found.left_out.items():
        calls.setdefault(reason, []).append(name)
    left_out = [
        f"left out {names[0]}{f' and {len(names) - 1} more' * (len(names) > 1)}: {reason}"
        for reason, names in calls.items()
    ]
    for sentence in filter(None, (found.note, *left_out)):
        say(sentence)
    return 0 if found.found else 1


def _plain(found: CacheErrors) -> dict[str, Any]:
    names = [each.name for each in found.formats]
    return {
        "errors": [asdict(each) for each in found.found],
        "budget": None if found.budget is None else str(found.budget),
        "keep": {name: found.kept(name) for name in names},
        "vllm": {name: found.vllm_flags(name) for name in names},
        "decode": {name: time._asdict() for name, time in found.decode.items()},
        "left_out": found.left_out,
        "unmeasured": found.unmeasured,
    }
