"""The README and the pages in docs/ agree with the code and with each other."""

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from benchmarks.tables import options

REPOSITORY = Path(__file__).resolve().parents[1]
DOCS = REPOSITORY / "docs"
PAGES = [REPOSITORY / "README.md", REPOSITORY / "SECURITY.md", *sorted(DOCS.glob("*.md"))]
MOST_PAGES = 21


def test_navigation_lists_every_page_in_five_groups() -> None:
    text = (REPOSITORY / "mkdocs.yml").read_text(encoding="utf-8")
    groups = yaml.safe_load(text.partition("\nnav:")[2].join(["nav:", ""]))["nav"]
    listed = [page for group in groups for pages in group.values() for page in pages]
    files = [file for page in listed for file in page.values()]
    assert [next(iter(group)) for group in groups] == [
        *("Start", "Guides", "Reference", "Explanations", "attention_kernels")
    ]
    assert sorted(files) == sorted(path.name for path in DOCS.glob("*.md"))
    assert len(files) <= MOST_PAGES


def test_readme_and_changelog_are_short() -> None:
    lines = {
        name: (REPOSITORY / name).read_text(encoding="utf-8").splitlines()
        for name in ("README.md", "CHANGELOG.md")
    }
    assert len(lines["README.md"]) <= 120
    assert len(lines["CHANGELOG.md"]) <= 60


def test_table_of_tasks_names_files_that_exist() -> None:
    page = (DOCS / "contributing.md").read_text(encoding="utf-8")
    table = page.partition("## Where to change what")[2].partition("## ")[0]
    paths = re.findall(r"`([\w/]+(?:/|\.py))`", table)
    assert len(paths) > 20
    assert [path for path in paths if not (REPOSITORY / path).exists()] == []


def test_pictures_and_linked_files_exist() -> None:
    found = [
        (page, target)
        for page in PAGES
        for target in re.findall(r"\]\(([^)#:\s]+)[)#]", page.read_text(encoding="utf-8"))
    ]
    assert len(found) > 100
    assert [str(target) for page, target in found if not (page.parent / target).exists()] == []


def command_lines(text: str) -> Iterator[list[str]]:
    """Yield the words of each `capture` or `replay` command in code, from the command's name on."""
    blocks = re.findall(r"^```sh\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    lines += re.findall(r"`((?:capture|replay) [^`\n]+)`", text)
    for line in lines:
        words = shlex.split(line.replace("…", "X"), comments=True)
        starts = [at for at, word in enumerate(words) if word in options.MAINS]
        if starts and (starts[0] == 0 or words[starts[0] - 1] in ("--", "&&", "time")):
            yield words[starts[0] :]


def unknown_words(words: list[str]) -> list[str]:
    command, *others = words
    verb = others[0] if others and not others[0].startswith("-") else ""
    if verb and verb not in options.VERBS[command]:
        return [verb]
    known = options.parser_of(command, verb)._option_string_actions
    flags = [word.partition("=")[0] for word in others if re.match(r"--?[a-z]", word)]
    return [flag for flag in flags if flag not in known]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_commands_on_a_page_have_known_options(page: Path) -> None:
    lines = list(command_lines(page.read_text(encoding="utf-8")))
    wrong = [f"{shlex.join(line)}: {words}" for line in lines if (words := unknown_words(line))]
    assert wrong == []


def test_unknown_option_of_a_page_is_found() -> None:
    (line,) = command_lines("```sh\n# a comment\nreplay --dir X \\\n  --gone --kernels A\n```\n")
    assert unknown_words(line) == ["--gone"]
    assert unknown_words(["capture", "vanish", "X"]) == ["vanish"]


@pytest.mark.slow
def test_cells_of_the_notebook_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    notebook = json.loads((DOCS / "first_five_minutes.ipynb").read_text(encoding="utf-8"))
    assert notebook["nbformat"] == 4
    names: dict[str, object] = {"__name__": "__main__"}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            exec(compile("".join(cell["source"]), cell["id"], "exec"), names)
    assert "mask-ignored" in str(names["diagnosis"])
