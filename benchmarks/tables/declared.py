"""Tables of declarations in the code: fields, columns, thresholds, distributions, features."""

from __future__ import annotations

from typing import get_args, get_type_hints

from benchmarks.tables.markdown import markdown_table
from capture.call.attention_variant import FEATURES
from replay.accuracy.thresholds import Thresholds
from replay.kernels.registry import catalogue
from replay.rows.fields import COLUMNS, FIELDS
from replay.rows.meaning import OverCalls
from replay.workloads.distributions import DISTRIBUTIONS

OVER_CALLS: dict[OverCalls, str] = {
    "median": "the median of the calls",
    "range": "the median of the calls",
    "lowest": "the worst of the calls",
    "highest": "the worst of the calls",
    "pooled": "all rounds of all calls together",
    "counts": "the number of calls with each verdict",
    "same": "the same for every call",
}
"""Description of each rule for readers of tables."""

ERRORS = ("reference", "captured", "kernel", "noise_floor", "chosen")
"""Sets of errors in a row's `accuracy`."""


def glossary() -> str:
    """List every column of `replay --metric all`, with the meaning of its field."""
    meaning = {item.path: item.meaning for item in FIELDS}
    lines = ["| column | meaning | over several calls |", "|---|---|---|"]
    for path, column in COLUMNS.items():
        text, over_calls = _escaped(meaning[path]), OVER_CALLS[column.over_calls]
        if column.over_calls == "range":  # the column has the lower end's path
            text = f"10th to 90th percentile{text.removeprefix('10th percentile')}"
        lines.append(f"| {column.heading} | {text} | {over_calls} |")
    return "\n".join(lines) + "\n"


def fields() -> str:
    """List every field of a row; the five sets of errors are listed once."""
    lines = ["| field | unit | meaning |", "|---|---|---|"]
    for item in FIELDS:
        path, meaning = item.path, item.meaning
        _, _, name = path.partition("accuracy.")
        if name.startswith(tuple(f"{each}." for each in ERRORS)):
            if not name.startswith("reference."):
                continue
            path = path.replace("reference", f"{{{','.join(ERRORS)}}}")
            meaning = meaning.partition(";")[0]
        lines.append(f"| `{path}` | {item.unit} | {_escaped(meaning)} |")
    return "\n".join(lines) + "\n"


def thresholds() -> str:
    """List the constants that `replay --tolerances` changes, with their defaults."""
    lines = ["| table | key | default | meaning |", "|---|---|---:|---|"]
    for table, values in vars(Thresholds()).items():
        hints = get_type_hints(type(values), include_extras=True)
        for key, value in vars(values).items():
            meaning = get_args(hints[key])[1]
            lines.append(f"| `[{table}]` | `{key}` | {value:g} | {meaning} |")
    return "\n".join(lines) + "\n"


def distributions() -> str:
    """List the values that `replay random --distribution` takes."""
    lines = ["| `--distribution` | what it provokes |", "|---|---|"]
    lines += [f"| `{name}` | {each.provokes} |" for name, each in DISTRIBUTIONS.items()]
    return "\n".join(lines) + "\n"


def features() -> str:
    """List the features that each kernel supports beyond SDPA; kernels without any are omitted, and
    so are variants with the same features as their kernel."""
    kernels = catalogue()
    lines = {
        f"`{name}`": ["yes" if feature in kernel.features else "" for feature in FEATURES]
        for name, kernel in kernels.items()
        if kernel.features
        and not (kernel.variant_of and kernel.features == kernels[kernel.variant_of].features)
    }
    return markdown_table(["kernel", *FEATURES.values()], lines)


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")
