"""Quotes the output of commands."""

from __future__ import annotations

from benchmarks import results


def demo() -> str:
    """Quote the screen that `make demo` printed."""
    return f"```\n{(results.DIRECTORY / 'demo.txt').read_text().rstrip()}\n```\n"


def end_to_end_printed() -> str:
    """Quote the output of `replay verify` for the built-in CogVideoX, up to the legend."""
    printed = (results.DIRECTORY / "end_to_end_demo.txt").read_text().splitlines()
    start = next(n for n, line in enumerate(printed) if line.startswith("cogvideo end to end"))
    end = next(n for n in range(start, len(printed)) if printed[n].startswith("predicted: "))
    return "\n".join(("```", *(line.rstrip() for line in printed[start:end]), "```", ""))


def energy() -> str:
    """Quote the energies that `replay --metric energy` printed."""
    printed = (results.DIRECTORY / "energy.txt").read_text().split("\n\nfastest")[0]
    return f"```\n{printed}\n```\n"


def attention_structure() -> str:
    """List the mean over the layers of each built-in model; the file has a line per layer."""
    text = (results.DIRECTORY / "attention_structure.md").read_text()
    printed, _, where = text.strip().rpartition("\n\n")
    heading, rule, *lines = [line.split("|") for line in printed.splitlines()]
    of_models = [line for line in lines if line[2].strip() == "all layers"]
    rows = ["|".join(line[:2] + line[3:]) for line in (heading, rule, *of_models)]
    return "\n".join((*rows, "", where, ""))


def devices() -> str:
    """Show the matrices that `replay devices --markdown` wrote, without their legend."""
    _, heading, matrices = (results.DIRECTORY / "devices.md").read_text().partition("**")
    return heading + matrices
