"""All ways to compute a file's checksum give the same result."""

import hashlib
from pathlib import Path

import pytest

from capture.storage.checksums import CHUNK, checksum, chunked, combined, digest

SIZES = [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, 3 * CHUNK + 5]


def content_of(size: int) -> bytes:
    return bytes(range(251)) * (size // 251) + bytes(size % 251)


def by_hand(content: bytes) -> str:
    chunks = [content[start : start + CHUNK] for start in range(0, len(content), CHUNK)]
    digests = b"".join(hashlib.sha256(chunk).digest() for chunk in chunks)
    return f"sha256-4MiB:{hashlib.sha256(digests).hexdigest()}"


@pytest.mark.parametrize("size", SIZES)
def test_file_and_its_pieces_have_the_checksum_of_the_definition(tmp_path: Path, size: int) -> None:
    content = content_of(size)
    path = tmp_path / "file"
    path.write_bytes(content)
    assert checksum(path) == by_hand(content)
    for length in (CHUNK, CHUNK // 2 + 1, 2 * CHUNK + 7):
        pieces = [content[start : start + length] for start in range(0, size, length)]
        chunks = chunked(pieces)
        assert [sum(map(len, chunk)) for chunk in chunks[:-1]] == [CHUNK] * (len(chunks) - 1)
        assert combined(map(digest, chunks)) == by_hand(content)
