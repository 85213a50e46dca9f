"""The model card: the weights, their training and their evaluation."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch


def write(directory: Path, title: str, sections: Mapping[str, str]) -> None:
    """Write ``README.md`` into ``directory``, with the sections in order."""
    blocks = [f"# {title}"] + [f"## {name}\n{text.strip()}" for name, text in sections.items()]
    (directory / "README.md").write_text("\n\n".join(blocks) + "\n", encoding="utf-8")


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def rates_table(rates: Mapping[str, Mapping[str, float]]) -> str:
    """Format percentages: a row per name, a column per judged part of the caption."""
    parts = list(dict.fromkeys(part for row in rates.values() for part in row))
    rows = [
        [name, *(f"{100 * row[part]:.0f} %" if part in row else "" for part in parts)]
        for name, row in rates.items()
    ]
    return table(["", *parts], rows)


def machine(device: torch.device) -> str:
    """Describe the device and the versions of torch and Python."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return f"{name}, torch {torch.__version__}, Python {platform.python_version()}"


def sizes(directory: Path) -> str:
    """Tabulate parameters and size of each weight file, and of the entire directory."""
    from safetensors import safe_open

    rows = []
    for path in sorted(directory.rglob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            count = sum(file.get_tensor(name).numel() for name in file.keys())  # noqa: SIM118
        name = path.parent.name if path.parent != directory else "model"
        rows.append([name, f"{count / 1e6:.2f} million", f"{path.stat().st_size / 1e6:.2f} MB"])
    total = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
    rows.append(["everything in this directory", "", f"{total / 1e6:.2f} MB"])
    return table(["part", "parameters", "size"], rows)
