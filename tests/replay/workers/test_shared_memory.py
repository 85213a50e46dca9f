"""Tensors are passed from one process to another."""

import mmap
import os
from pathlib import Path

import pytest
import torch

from replay.workers import shared_memory
from replay.workers.shared_file import SharedFile
from replay.workers.shared_memory import ALIGNMENT, CHUNK_BYTES, Inbox, Outbox

CPU = torch.device("cpu")


@pytest.fixture(params=["in memory", "on disk"])
def shared(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> SharedFile:
    if request.param == "on disk":
        monkeypatch.delattr(os, "memfd_create", raising=False)
    elif not hasattr(os, "memfd_create"):
        pytest.skip("this system has no files in memory")
    return SharedFile()


def test_tensors_arrive_as_they_were(shared: SharedFile) -> None:
    whole, file = (
        torch.arange(2 * 3 * 5 * 4, dtype=torch.float32).view(2, 3, 5, 4),
        shared.descriptor,
    )
    sent = {
        "output": whole.to(torch.bfloat16),
        "transposed": whole.mT,
        "expanded": whole[:1].expand(4, -1, -1, -1),
        "chosen": whole > 7,
        "empty": whole[:, :, :0],
        "scalar": torch.tensor(3.5, dtype=torch.float64),
    }
    found = Inbox(file, CPU).take(Outbox(file, CPU).put(sent))
    assert found.keys() == sent.keys()
    for name, tensor in sent.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


def test_expanded_dimensions_are_sent_once(shared: SharedFile) -> None:
    wide = torch.tensor([[True], [False]]).expand(2, 2**40)
    message = Outbox(shared.descriptor, CPU).put({"chosen": wide})
    assert message["bytes"] == ALIGNMENT
    found = Inbox(shared.descriptor, CPU).take(message)["chosen"]
    assert (found.shape, found[:, -1].tolist()) == (wide.shape, [True, False])


def test_file_grows_for_every_sender(shared: SharedFile) -> None:
    """Each sender notices that the file has grown, and taken tensors stay."""
    file = shared.descriptor
    one, other, inbox = Outbox(file, CPU), Outbox(file, CPU), Inbox(file, CPU)
    sizes = ((one, 10), (other, CHUNK_BYTES), (one, 20), (one, CHUNK_BYTES + 1))
    sent = [torch.randn(elements) for _, elements in sizes]
    found = [inbox.take(by.put({"it": each})) for (by, _), each in zip(sizes, sent, strict=True)]
    assert all(torch.equal(a["it"], b) for a, b in zip(found, sent, strict=True))


def test_full_disk_is_an_error_before_anything_is_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without this error, writing to the mapped file would kill the process."""
    monkeypatch.setattr(shared_memory, "CHUNK_BYTES", 512)
    with open("/dev/full", "r+b", 0) as full, pytest.raises(OSError, match="No space left"):
        Outbox(full.fileno(), CPU).put({"output": torch.ones(10_000)})


def test_file_in_memory_cannot_become_smaller(shared: SharedFile) -> None:
    """A reader of a page that is gone would be ended by SIGBUS."""
    if hasattr(os, "memfd_create"):
        Outbox(shared.descriptor, CPU).put({"output": torch.ones(4)})
        with pytest.raises(PermissionError):
            os.truncate(shared.descriptor, 0)


def test_message_beyond_the_file_is_refused(shared: SharedFile) -> None:
    message = Outbox(shared.descriptor, CPU).put({"output": torch.ones(4)})
    message["tensors"]["output"][1] = [CHUNK_BYTES]
    with pytest.raises(ValueError, match="ends at byte"):
        Inbox(shared.descriptor, CPU).take(message)


@pytest.mark.skipif(not hasattr(mmap, "MADV_DONTFORK"), reason="forks keep memory here")
def test_fork_cannot_write_outputs() -> None:
    """A kernel that forks returns twice, and the fork's output could come in another kernel's."""
    shared = SharedFile()
    outbox = Outbox(shared.descriptor, CPU)
    outbox.put({"output": torch.ones(3)})
    maps = Path("/proc/self/maps")
    assert "memfd:attention-replay" in maps.read_text()
    if (fork := os.fork()) == 0:
        os._exit("memfd:attention-replay" in maps.read_text())
    assert os.waitpid(fork, 0)[1] == 0
