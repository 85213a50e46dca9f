"""The import directions that docs/architecture.md draws."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
PAGE = REPOSITORY / "docs" / "architecture.md"


def layers() -> list[str]:
    """The folders of `replay/`, the highest first, as the page's drawing has them."""
    drawing = PAGE.read_text(encoding="utf-8").partition("```text\n")[2].partition("```")[0]
    return re.findall(r"^ *(\w+)/ ", drawing, re.MULTILINE)


def imports(package: str) -> Iterator[tuple[Path, str]]:
    """Every import in a package, late ones and those for types too: file and dotted name."""
    for path in sorted((REPOSITORY / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                for alias in node.names:
                    yield path, f"{node.module}.{alias.name}"
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    yield path, alias.name


def test_the_drawing_has_every_folder() -> None:
    folders = {path.parent.name for path in (REPOSITORY / "replay").glob("*/__init__.py")}
    assert set(layers()) == folders


def test_imports_in_replay_point_down() -> None:
    order = layers()
    found = 0
    for path, name in imports("replay"):
        importing = path.relative_to(REPOSITORY / "replay").parts[0]
        imported = name.split(".")[1] if name.startswith("replay.") else ""
        if importing in order and imported in order:
            found += 1
            assert order.index(importing) <= order.index(imported), f"{path} imports {name}"
    assert found > 200


def test_packages_know_what_they_may() -> None:
    allowed = {"capture": set(), "models": set(), "replay": {"capture"}}
    ours = {"attention_replay", "capture", "replay", "models", "compatibility"}
    for package, others in allowed.items():
        for path, name in imports(package):
            imported = name.partition(".")[0]
            wrong = ours - others - {package, "attention_replay"}
            assert imported not in wrong, f"{path} imports {name}"
