"""Draws sentences from code, `--help`, messages and docs, for a native reader to judge.

    python -m tests.random_sentences [COUNT]

The commit's hash is the seed, so that two readers get the same sentences.
"""

from __future__ import annotations

import ast
import random
import re
import subprocess
import sys
from pathlib import Path

from tests.test_plain_english import HOUSES, REPOSITORY, files_below

SENTENCE = re.compile(r"[A-Z`][^.!?\n]{20,220}?[.!?](?=\s|$)")


def from_code(path: Path) -> list[str]:
    """Return the sentences in a Python file's docstrings, comments, option helps and errors."""
    text = path.read_text(encoding="utf-8")
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            prose = re.split(
                r"\n\s*(?:Args|Returns|Raises|Attributes|Example)s?:", str(node.value.value)
            )
            paragraphs = [" ".join(part.split()) for part in prose[0].split("\n\n")]
            found += [line for part in paragraphs for line in SENTENCE.findall(part)]
        elif isinstance(node, ast.keyword) and node.arg == "help":
            found.append(message_of(node.value))
        elif isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            found.append(message_of(node.exc.args[0]))
    comments = re.findall(r"^ *# (.*(?:\n *# .*)*)", text, re.MULTILINE)
    found += [" ".join(re.sub(r"\n *# ?", " ", part).split()) for part in comments]
    return [line for line in found if line.count(" ") > 2]


def message_of(node: ast.expr) -> str:
    """Return the text of a string or f-string, with expressions in braces; "" for other nodes."""
    if isinstance(node, ast.Constant):
        return " ".join(str(node.value).split())
    if isinstance(node, ast.JoinedStr):
        parts = [
            f"{{{ast.unparse(part.value)}}}"
            if isinstance(part, ast.FormattedValue)
            else ast.literal_eval(part)
            for part in node.values
        ]
        return " ".join("".join(parts).split())
    return ""


def from_page(path: Path) -> list[str]:
    """Return the sentences in a Markdown page, without its code and tables."""
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    prose = "\n".join(line for line in text.splitlines() if not line.startswith(("|", "#", "<")))
    paragraphs = [" ".join(part.split()) for part in prose.split("\n\n")]
    return [found for part in paragraphs for found in SENTENCE.findall(part)]


def main() -> None:
    """Print random sentences, each with its file."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 120
    seed = subprocess.check_output(["git", "rev-parse", "HEAD"], text=True).strip()
    found = {
        (path.relative_to(REPOSITORY).as_posix(), sentence)
        for house in HOUSES
        for path in files_below(REPOSITORY / house)
        for sentence in from_code(path)
    } | {
        (path.relative_to(REPOSITORY).as_posix(), sentence)
        for path in [REPOSITORY / "README.md", *(REPOSITORY / "docs").rglob("*.md")]
        for sentence in from_page(path)
    }
    drawn = random.Random(seed).sample(sorted(found), count)
    for number, (path, sentence) in enumerate(drawn, 1):
        print(f"{number}. [{path}] {sentence}")


if __name__ == "__main__":
    main()
