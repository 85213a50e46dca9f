"""Checks the mechanical rules of docs/contributing.md for docstrings, comments and messages.

`python -m tests.test_plain_english [PATH …]` lists the violations.
"""

import ast
import io
import itertools
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
HOUSES = (
    "attention_kernels",
    "attention_replay",
    "benchmarks",
    "capture",
    "compatibility",
    "models",
    "replay",
    "tests",
)

CLAUSES = "What|Of|Whether|Which|Whose|Who|How|That|Those|Where|When|Why|If|For|As|With|By|In"
NOT_VERBS = re.compile(rf"(?:{CLAUSES}|A|An|The|Its|All|Each|One|This|These|None|\d\S*|[^A-Z]\S*)$")
"""Words that cannot start a function's docstring, because they are not verbs."""
CLAUSE = re.compile(r"(?:What|Of|Whether|Which|Whose|Who|How|That|Those)\b")
THIRD_PERSON = re.compile(r"[A-Z][a-z]+[^s]s$")
AVOIDED = re.compile(
    r"\b(nobody|somebody|whoever|(?<![Tt]here )(?:is|are) (?:no|none)\b(?! longer)"
    r"|(?:is|was) (?:told|said)|those that|of which)\b(?! \()"
)
PASSAGES = ("models/generation.py",)
"""Files whose strings contain text for a model to read."""


def first_word_faults(tree: ast.Module, is_test: bool) -> Iterator[tuple[int, str]]:
    """Yield the line and first sentence of docstrings that begin with the wrong kind of word."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
            body, text = node.body, ast.get_docstring(node)
            yield from _attribute_faults(body)
            if not text:
                continue
            first = text.split(maxsplit=1)[0].rstrip(".,:;")
            is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not (
                is_test or _is_property(node)
            )
            wrong = bool(CLAUSE.match(text))
            if is_function:
                wrong = bool(NOT_VERBS.match(first) or THIRD_PERSON.match(first))
            if wrong:
                yield body[0].lineno, text.partition("\n")[0]


def _is_property(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    names = {part for each in node.decorator_list for part in ast.unparse(each).split(".")}
    return bool(names & {"property", "cached_property", "fixture", "setter"}) or any(
        "fixture" in name for name in names
    )


def _attribute_faults(body: list[ast.stmt]) -> Iterator[tuple[int, str]]:
    for before, node in itertools.pairwise(body):
        is_assignment = isinstance(before, ast.Assign | ast.AnnAssign)
        if is_assignment and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            text = str(node.value.value).strip()
            if CLAUSE.match(text):
                yield node.lineno, text.partition("\n")[0]


def avoided_phrases(text: str) -> Iterator[tuple[int, str]]:
    """Yield line number and words of avoided phrases in comments, docstrings and messages."""
    if not AVOIDED.search(text):
        return  # skips tokenizing, which takes most of the time
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if tokenize.tok_name[token.type] in ("COMMENT", "STRING", "FSTRING_MIDDLE"):
            for found in AVOIDED.finditer(token.string):
                line = token.start[0] + token.string[: found.start()].count("\n")
                yield line, found[0]


def faults(path: Path) -> list[str]:
    """Return a line for each fault of a file, with its place and the text."""
    text = path.read_text(encoding="utf-8")
    name = path.resolve().relative_to(REPOSITORY)
    is_test = name.parts[0] == "tests"
    found = list(first_word_faults(ast.parse(text), is_test))
    if name.as_posix() not in PASSAGES:
        found += avoided_phrases(text)
    return [f"{name}:{line}: {said}" for line, said in sorted(found)]


def files_below(*roots: Path) -> list[Path]:
    found = (each for root in roots for each in ([root] if root.is_file() else root.rglob("*.py")))
    return sorted(path for path in found if path.resolve() != Path(__file__).resolve())


@pytest.mark.parametrize("house", HOUSES)
def test_sentences_are_plain(house: str) -> None:
    assert not [line for path in files_below(REPOSITORY / house) for line in faults(path)]


def test_faults_are_found(tmp_path: Path) -> None:
    code = (
        'def a():\n    """Whether it is right."""\n    # somebody\n'
        'B = 1\n"""What is left."""\n'
        'def c():\n    """Returns it."""\n    raise ValueError("70000 is no port")\n'
    )
    tree = ast.parse(code)
    assert [line for line, _ in first_word_faults(tree, False)] == [5, 2, 7]
    assert [said for _, said in avoided_phrases(code)] == ["somebody", "is no"]


if __name__ == "__main__":
    listed = files_below(*(Path(each) for each in sys.argv[1:] or HOUSES))
    print("\n".join(line for path in listed for line in faults(path)))
