"""The text that ships with Python: the standard library's sources and the language reference.

A checksum of each document's name assigns it to one of three parts, so that a file held out with
one Python version is held out with all others. Licence of the text: PSF.
"""

from __future__ import annotations

import ast
import hashlib
import platform
import sysconfig
import zlib
from dataclasses import dataclass
from pathlib import Path

SMALLEST, LARGEST = 200, 400_000  # bytes; larger files are tables
# Tables written as Python, packages outside the standard library, and generated files.
LEFT_OUT = {"encodings", "site-packages", "dist-packages", "__pycache__", "pydoc_data", "_vendor"}
ONE_IN = 40


@dataclass(frozen=True)
class Document:
    """``name`` is the path inside the library, or ``reference/TOPIC``."""

    name: str
    text: str

    @property
    def part(self) -> str:
        """``train``, ``validation`` (chooses when to stop) or ``test`` (measured once)."""
        remainder = zlib.crc32(self.name.encode()) % ONE_IN
        return {0: "test", 1: "validation"}.get(remainder, "train")


@dataclass(frozen=True)
class Corpus:
    """Documents by part, sorted by name. ``source`` names their Python version; ``licence`` is the
    text that must accompany quotes, empty if the library has none."""

    source: str
    licence: str
    train: tuple[Document, ...]
    validation: tuple[Document, ...]
    test: tuple[Document, ...]

    def describe(self) -> str:
        """Describe the corpus in one sentence, with a checksum of all of it."""
        digest = hashlib.sha256()
        for document in (*self.train, *self.validation, *self.test):
            digest.update(f"{document.name}\0{document.text}\0".encode())
        sizes = ", ".join(
            f"{len(part)} documents of {sum(len(d.text) for d in part) / 1e6:.2f} million "
            f"characters to {purpose}"
            for part, purpose in (
                (self.train, "train"),
                (self.validation, "choose when to stop"),
                (self.test, "test"),
            )
        )
        return f"{self.source}: {sizes}; SHA-256 of all {digest.hexdigest()[:16]}"


def read(library: Path | None = None) -> Corpus:
    """Read the standard library in ``library``, by default the running Python's.

    Raises:
        FileNotFoundError: There is no Python source.
    """
    if library is None:
        library = Path(sysconfig.get_paths()["stdlib"])
        source = f"Python {platform.python_version()}"
    else:
        source = f"The library in {library.resolve().name}"
    documents = _reference(library) + _sources(library)
    if not documents:
        raise FileNotFoundError(f"{library} contains no Python source: give another --library")
    documents.sort(key=lambda document: document.name)
    parts = {
        part: tuple(document for document in documents if document.part == part)
        for part in ("train", "validation", "test")
    }
    file = library / "LICENSE.txt"
    licence = file.read_text(encoding="utf-8") if file.is_file() else ""
    return Corpus(source, licence, **parts)


def _sources(library: Path) -> list[Document]:
    documents = []
    for path in sorted(library.rglob("*.py")):
        name = path.relative_to(library)
        if LEFT_OUT & set(name.parts) or not SMALLEST <= path.stat().st_size <= LARGEST:
            continue
        try:
            documents.append(Document(name.as_posix(), path.read_text(encoding="utf-8")))
        except UnicodeDecodeError:  # a test file in another encoding
            continue
    return documents


def _reference(library: Path) -> list[Document]:
    """Read the chapters behind ``help("topics")``: prose, in the documentation's markup."""
    path = library / "pydoc_data" / "topics.py"
    if not path.is_file():
        return []
    chapters: dict[str, str] = {}
    for statement in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.Assign):
            chapters = ast.literal_eval(statement.value)
    return [
        Document(f"reference/{topic}", text.strip() + "\n")
        for topic, text in chapters.items()
        if len(text) >= SMALLEST
    ]
