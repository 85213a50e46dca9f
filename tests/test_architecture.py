"""Imports follow the directions drawn in docs/contributing.md."""

import ast
import functools
import re
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
PAGE = REPOSITORY / "docs" / "contributing.md"


FOUND = {"capture": 120, "replay": 200}
"""Minimum number of imports expected between folders, or from another folder of the package."""

layered = pytest.mark.parametrize("package", FOUND)


def layers(package: str) -> list[str]:
    """Return the folders of a package from the page's drawing, highest first."""
    section = PAGE.read_text(encoding="utf-8").partition(f"## Inside `{package}/`\n")[2]
    drawing = section.partition("```text\n")[2].partition("```")[0]
    return re.findall(r"^ *(\w+)/ ", drawing, re.MULTILINE)


def wrong_imports(package: str, order: list[str], root: Path) -> tuple[list[str], int]:
    """Return the imports that point up, and the number of imports inspected.

    Files outside the folders are below all folders, except the package's own entry points.
    """
    files = {path.stem for path in (root / package).glob("*.py")} - {"__init__", "__main__"}
    ranks = {name: rank for rank, name in enumerate(order)} | dict.fromkeys(files, len(order))
    wrong, found = [], 0
    for path, name in imports(package, root):
        importing = path.relative_to(root / package).with_suffix("").parts[0]
        imported = name.split(".")[1] if name.startswith(f"{package}.") else ""
        if importing in ranks and imported in ranks:
            found += 1
            if ranks[importing] > ranks[imported]:
                wrong.append(f"{path} imports {name}")
    return wrong, found


@functools.cache
def imports(package: str, root: Path = REPOSITORY) -> list[tuple[Path, str]]:
    """Return file and absolute name of all imports, even in functions or under TYPE_CHECKING."""
    found = []
    for path in sorted((root / package).rglob("*.py")):
        folder = path.relative_to(root).parts[:-1]
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                base = folder[: len(folder) - node.level + 1] if node.level else ()
                for alias in node.names:
                    name = ".".join([*base, *filter(None, [node.module]), alias.name])
                    found.append((path, name))
            elif isinstance(node, ast.Import):
                found += [(path, alias.name) for alias in node.names]
    return found


def module_name(path: Path, root: Path = REPOSITORY) -> str:
    return ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


def import_graph(package: str, root: Path = REPOSITORY) -> dict[str, set[str]]:
    """Return, for each module of a package, the modules of that package that it imports."""
    graph: dict[str, set[str]] = {
        module_name(path, root): set() for path in (root / package).rglob("*.py")
    }
    for path, name in imports(package, root):
        # `from a.b import c` imports the module a.b.c if it exists, and a.b otherwise.
        imported = name if name in graph else name.rpartition(".")[0]
        if imported in graph:
            graph[module_name(path, root)].add(imported)
    return graph


@layered
def test_the_drawing_has_every_folder(package: str) -> None:
    folders = [path.parent.name for path in (REPOSITORY / package).glob("*/__init__.py")]
    assert sorted(layers(package)) == sorted(folders)


@layered
def test_imports_point_down(package: str) -> None:
    wrong, found = wrong_imports(package, layers(package), REPOSITORY)
    assert not wrong
    assert found > FOUND[package]


def lines_of_models() -> dict[str, int]:
    """Return the line number of each file and folder in the drawing in `models/__init__.py`."""
    text = ast.get_docstring(ast.parse((REPOSITORY / "models" / "__init__.py").read_text("utf-8")))
    drawing = re.findall(r"^    (\S.*)$", text, re.MULTILINE)
    # Only descriptions, which follow the names on a line, have several words.
    cells = ((at, cell) for at, line in enumerate(drawing) for cell in re.split(r" {2,}", line))
    return {cell.rstrip("/"): at for at, cell in cells if re.fullmatch(r"\w+/?", cell)}


def not_from_below(lines: dict[str, int], graph: dict[str, set[str]]) -> list[str]:
    """Return imports of files or folders that are drawn on the importing file's line or above."""

    def drawn(module: str) -> str:
        return module.split(".")[1] if "." in module else "__init__"

    return [
        f"{importing} imports {imported}"
        for importing, others in graph.items()
        for imported in others
        if drawn(importing) != drawn(imported) and lines[drawn(importing)] >= lines[drawn(imported)]
    ]


def test_files_of_models_import_from_the_lines_below() -> None:
    lines, graph = lines_of_models(), import_graph("models")
    files = {path.stem for path in (REPOSITORY / "models").glob("*.py")}
    folders = {path.parent.name for path in (REPOSITORY / "models").glob("*/__init__.py")}
    assert lines.keys() == files | folders
    assert not not_from_below(lines, graph)
    assert sum(map(len, graph.values())) > 40


def test_an_import_that_points_up_is_found(tmp_path: Path) -> None:
    files = {
        "__init__.py": "from package.high import a\n",
        "word.py": "def late():\n    from package.low import b\n",
        "high/a.py": "from package import word\nfrom package.low import b\n",
        "low/b.py": "from ..high import a\n",
    }
    for name, text in files.items():
        path = tmp_path / "package" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    wrong, found = wrong_imports("package", ["high", "low"], tmp_path)
    assert [line.rpartition("/")[2] for line in wrong] == [
        "b.py imports package.high.a",
        "word.py imports package.low.b",
    ]
    assert found == 4


def test_packages_know_what_they_may() -> None:
    allowed = {"capture": set(), "models": set(), "replay": {"capture"}}
    ours = {"attention_replay", "capture", "replay", "models", "compatibility"}
    for package, others in allowed.items():
        for path, name in imports(package):
            imported = name.partition(".")[0]
            wrong = ours - others - {package, "attention_replay"}
            assert imported not in wrong, f"{path} imports {name}"


@pytest.mark.parametrize("package", ["capture", "models", "replay"])
def test_no_modules_import_each_other_in_a_circle(package: str) -> None:
    TopologicalSorter(import_graph(package)).prepare()  # raises a CycleError that names the cycle


def test_a_metric_is_declared_once() -> None:
    """Only the code beside a metric's field states its column, unit and meaning."""
    from replay.rows.fields import COLUMNS, FIELDS, METRICS

    paths = {field.path for field in FIELDS}
    assert set(COLUMNS) <= paths
    assert {column.metric for column in COLUMNS.values()} == set(METRICS) - {"all"}
    assert all(field.meaning and "{}" not in field.meaning for field in FIELDS)


def test_replay_imports_no_verb_of_capture() -> None:
    assert not [path for path, name in imports("replay") if name.startswith("capture.cli")]
