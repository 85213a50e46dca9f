"""The text corpus from the standard library has disjoint parts and a count-based baseline."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.training import corpus, llama
from benchmarks.training.ngram import KneserNey


@pytest.fixture(scope="module")
def text() -> corpus.Corpus:
    return corpus.read()


def test_parts_are_disjoint_and_what_is_held_out_is_small(text: corpus.Corpus) -> None:
    names = [{d.name for d in part} for part in (text.train, text.validation, text.test)]
    assert not names[0] & names[1]
    assert not names[0] & names[2]
    assert not names[1] & names[2]
    assert len(names[0]) > 10 * len(names[2]) > 0


def test_it_has_sources_and_prose_but_no_tables(text: corpus.Corpus) -> None:
    documents = {d.name: d.text for d in (*text.train, *text.validation, *text.test)}
    assert "import" in documents["argparse.py"]
    assert any(name.startswith("reference/") for name in documents)
    assert not any(name.startswith(("encodings/", "site-packages/")) for name in documents)
    assert max(map(len, documents.values())) <= corpus.LARGEST


def test_a_document_belongs_to_the_same_part_everywhere() -> None:
    assert corpus.Document("http/server.py", "").part == "test"
    assert corpus.Document("argparse.py", "other text").part == "train"


def test_a_directory_without_python_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="give another --library"):
        corpus.read(tmp_path)


def test_what_is_quoted_is_neither_a_test_nor_partly_of_another_licence() -> None:
    names = ("one.py", "test/two.py", "asyncio/three.py", "four.py")
    quoted = llama.held_out_text(tuple(corpus.Document(name, f"[{name}]") for name in names))
    assert sorted(quoted.split("\n\n")) == ["[four.py]", "[one.py]"]


def test_probabilities_sum_to_one_after_known_and_unknown_contexts() -> None:
    tokens = np.random.default_rng(0).integers(0, 20, 3000)
    model = KneserNey(tokens, vocabulary=20, order=3)
    for context in (tokens[10:12], np.array([19, 19])):
        total = sum(
            float(model.probabilities(np.array([*context, token]))[0]) for token in range(20)
        )
        assert total == pytest.approx(1)


def test_a_longer_context_predicts_the_text_better(text: corpus.Corpus) -> None:
    def as_bytes(part: tuple[corpus.Document, ...], most: int) -> np.ndarray:
        joined = "".join(document.text for document in part).encode()[:most]
        return np.frombuffer(joined, dtype=np.uint8).astype(np.int64)

    train, test = as_bytes(text.train, 1_000_000), as_bytes(text.test, 50_000)
    perplexities = [
        KneserNey(train, vocabulary=256, order=order).perplexity(test) for order in (1, 2, 3, 5)
    ]
    assert perplexities == sorted(perplexities, reverse=True)
    assert 20 < perplexities[0] < 50  # typical of bytes in English and Python
    assert 2 < perplexities[-1] < 8


def test_ids_that_cannot_be_packed_are_refused() -> None:
    with pytest.raises(ValueError, match="do not fit"):
        KneserNey(np.zeros(9, dtype=np.int64), vocabulary=32000, order=5)
