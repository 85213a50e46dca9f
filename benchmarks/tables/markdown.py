"""The form of a table in Markdown, and the line below it that names the machine."""

from __future__ import annotations


def markdown_table(headings: list[str], lines: dict[str, list[str]]) -> str:
    """Lay out lines, given by their first cell; all columns but the first are aligned right."""
    text = [f"| {' | '.join(headings)} |", f"|---|{'---:|' * (len(headings) - 1)}"]
    text += [f"| {first} | {' | '.join(cells)} |" for first, cells in lines.items()]
    return "\n".join(text) + "\n"


def machine_line(rows: list[dict[str, str]]) -> str:
    """Name the device and the versions that the rows were measured with, below a table."""
    first = rows[0]
    versions = ", ".join(
        f"{name} {first[f'machine.{name}']}"
        for name in ("torch", "cuda", "cudnn", "triton")
        if first.get(f"machine.{name}")
    )
    return f"\n{first['machine.device']}, {versions}.\n"
