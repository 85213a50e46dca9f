"""A file of tensors is complete or has no header, even if no thread can be started."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from capture.storage import checksums, tensor_file
from capture.storage.checksums import CHUNK
from capture.storage.tensor_file import TensorFile, write_safetensors


def test_file_that_is_cut_while_it_is_written_has_no_header(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several threads write chunks, so the full length does not prove that a file is complete."""
    path = tmp_path / "file.safetensors"
    tensors = {"query": torch.ones(3 * CHUNK // 4)}
    original = tensor_file._write_at

    def killed_at_the_first(descriptor: int, offset: int, pieces: list[memoryview]) -> None:
        if offset == 0:
            raise KeyboardInterrupt
        original(descriptor, offset, pieces)

    monkeypatch.setattr(tensor_file, "_write_at", killed_at_the_first)
    with pytest.raises(KeyboardInterrupt):
        write_safetensors(path, tensors, {})
    content = path.read_bytes()
    assert len(content) > 2 * CHUNK
    assert content[:8] == bytes(8)


def test_file_is_written_and_read_where_no_thread_can_be_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the end of a program, Python cannot start threads."""

    def refused(*args: object) -> None:
        raise RuntimeError("cannot schedule new futures after interpreter shutdown")

    path = tmp_path / "file.safetensors"
    query = torch.arange(3 * CHUNK // 4, dtype=torch.int32)
    monkeypatch.setattr(ThreadPoolExecutor, "submit", refused)
    checksum = write_safetensors(path, {"query": query}, {})
    with TensorFile.opened(path) as file:
        assert torch.equal(file.read(checksum)["query"], query)
    monkeypatch.undo()
    assert checksum == checksums.checksum(path)
