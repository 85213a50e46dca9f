"""The dataset card of a shared recording: `README.md` with the Hub's YAML front matter.

Fields of the front matter: https://huggingface.co/docs/hub/datasets-cards
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from capture.storage.call_file import FileEntry
from capture.storage.capture_record import CaptureRecord
from capture.storage.dataset import Dataset
from capture.storage.header_text import mask_text, strides_text
from capture.text.counted import counted, human_bytes
from capture.text.printable import printable, quoted

CARD = "README.md"

TAGS = ("attention", "query-key-value", "activations", "kernels", "benchmark", "attention-replay")

MOST_LINES = 60
"""Maximum number of lines in the table of calls."""

REVEALED = """\
Query, key and value are computed from what the model was given, and carry much of it.

- **Text.** With the model's weights, a prompt can be reconstructed from keys and values
  ([Luo et al. 2025](https://arxiv.org/abs/2508.09442)), and from the activations between layers
  ([Qu et al. 2025](https://arxiv.org/abs/2503.09022)). Treat a call as if it were its prompt.
- **Images and video.** Expect the same of inputs and of what the model generated.
- **Settings.** The manifest repeats the settings above, including prompts and paths.
- **Weights.** No weights are included, but every value is computed from them. The licence of the
  weights may restrict who may publish or use such values."""


def card(dataset: Dataset, address: str, licence: str) -> str:
    """Return the text of the card.

    Args:
        dataset: the copy, with the calls that it keeps.
        address: directory or address where others find the copy.
        licence: identifier of the Hub for the copy's licence; empty if it is not decided.
    """
    models = ", ".join(dict.fromkeys(_cell(capture.model) for capture in dataset.captures))
    where = json.dumps(printable(address), ensure_ascii=False)
    option = printable(quoted(address))
    parts = [
        _front_matter(f"Attention calls of {models}", len(dataset), licence),
        f"# Attention calls of {models}",
        f"{counted(len(dataset), 'call')} of attention ({human_bytes(dataset.nbytes)}), recorded "
        "while the model ran: query, key, value and mask as the model passed them, with their "
        "strides, and the output that it received.",
        "## Content",
        "\n".join(_table(dataset.entries)),
        "Shapes are batch × heads × length × head dimension, with query/key where they differ. "
        "Each call is one safetensors file; `manifest.json` has the checksums, and counts every "
        "attention call of the run, stored or not.",
        "## How it was recorded",
        *(_recorded(capture, dataset.entries) for capture in dataset.captures),
        "## How to use it",
        f"```sh\ncapture show {option}\nreplay --dir {option} --metric all\n```",
        f"```python\nimport attention_replay as ar\n\nfor call in ar.load({where}):\n"
        "    print(call.origin.module, call.shape)\n```",
        "## What it may reveal",
        REVEALED,
        "## Licence",
        f"`{licence}`" if licence else "Not decided. Ask the publisher before you use this copy.",
    ]
    return "\n\n".join(parts) + "\n"


def _front_matter(title: str, calls: int, licence: str) -> str:
    # A string in JSON is also one in YAML.
    lines = [f"license: {json.dumps(licence)}"] if licence else []
    lines += [
        f"pretty_name: {json.dumps(title, ensure_ascii=False)}",
        "tags:",
        *(f"- {tag}" for tag in TAGS),
        f"size_categories:\n- {_size_category(calls)}",
        "viewer: false",  # the Hub's viewer cannot read tensors
    ]
    return "\n".join(["---", *lines, "---"])


def _size_category(calls: int) -> str:
    """Return the Hub's name for a number of examples, such as `1K<n<10K`."""
    bounds = {"1K": 10**3, "10K": 10**4, "100K": 10**5, "1M": 10**6}
    below = ""
    for name, bound in bounds.items():
        if calls < bound:
            return f"{below}n<{name}"
        below = f"{name}<"
    return "n>1M"


def _table(entries: Sequence[FileEntry]) -> Iterator[str]:
    """Yield a table with a line for each kind of call."""
    kinds: dict[tuple[str, ...], list[FileEntry]] = {}
    for entry in entries:
        header, origin = entry.header, entry.origin
        words = str(header.shape), header.dtype, mask_text(header), strides_text(header)
        kinds.setdefault((origin.model, origin.phase, *words), []).append(entry)
    yield "| model | phase | shape | dtype | mask | memory | calls | layers | steps |"
    yield "|---|---|---|---|---|---|---:|---:|---:|"
    for number, (kind, alike) in enumerate(kinds.items()):
        if number == MOST_LINES:
            yield f"\n… and {counted(len(kinds) - MOST_LINES, 'more kind')} of call."
            return
        layers, steps = (
            len({getattr(entry.origin, name) for entry in alike}) for name in ("module", "step")
        )
        cells = [*map(_cell, kind), *(f"{each:,}" for each in (len(alike), layers, steps))]
        yield f"| {' | '.join(cells)} |"


def _recorded(capture: CaptureRecord, entries: Sequence[FileEntry]) -> str:
    """Describe how one capture was recorded."""
    stored = sum(entry.origin.model == capture.model for entry in entries)
    versions = ", ".join(f"{name} {version}" for name, version in capture.versions.items())
    facts = {
        "weights": capture.weights or "not stated",
        "calls": f"{stored:,} of {capture.calls_seen:,} in the run" * (capture.calls_seen > 0),
        "left out": capture.left_out,
        "sampling": capture.sample,
        "modules": "" if capture.modules == "*" else capture.modules,
        "heads": capture.heads,
        "date": capture.started[:10],
        "device": capture.device,
        "versions": versions,
    }
    lines = [f"**{_cell(capture.model)}**", ""]
    lines += [f"- {name}: {_cell(fact)}" for name, fact in facts.items() if fact]
    if capture.weights.startswith("random"):
        lines.append("- Random weights: the values serve for timing, not for judging accuracy.")
    if capture.settings:
        settings = json.dumps(capture.settings, indent=2, ensure_ascii=False)
        # Indented text is code, so that nothing in the settings becomes Markdown.
        lines += ["", "Settings of the run:", "", *(f"    {each}" for each in settings.split("\n"))]
    return "\n".join(printable(line) for line in lines)


def _cell(text: str) -> str:
    """Return untrusted text of a recording without Markdown or HTML."""
    return "".join(f"\\{each}" if each in r"\`*_[]<>|#&!~" else each for each in printable(text))
