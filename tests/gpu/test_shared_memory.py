"""A GPU's tensors are passed to another process through locked or unlocked pages."""

import pytest
import torch

from replay.workers.shared_file import SharedFile
from replay.workers.shared_memory import CHUNK_BYTES, Inbox, Outbox

CUDA = torch.device("cuda")


@pytest.fixture
def shared() -> SharedFile:
    return SharedFile()


def test_tensors_arrive_as_they_were(shared: SharedFile) -> None:
    outbox, inbox = Outbox(shared.descriptor, CUDA), Inbox(shared.descriptor, CUDA)
    for length in (100, CHUNK_BYTES, 200):  # the file grows and is locked again
        sent = torch.randn(2, 3, length, dtype=torch.bfloat16, device=CUDA)
        found = inbox.take(outbox.put({"output": sent, "transposed": sent.mT}))
        assert found["output"].is_cuda
        assert torch.equal(found["output"], sent)
        assert torch.equal(found["transposed"], sent.mT)


def test_tensors_arrive_without_locked_pages(
    shared: SharedFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA's error from locking pages must not be blamed on the next kernel."""
    cudart, register = torch.cuda.cudart(), torch.cuda.cudart().cudaHostRegister
    refused = []

    def refuse(address: int, size: int, flags: int) -> object:
        refused.append(register(0, size, flags))
        return refused[-1]

    monkeypatch.setattr(cudart, "cudaHostRegister", refuse)
    sent = torch.randn(100, device=CUDA)
    message = Outbox(shared.descriptor, CUDA).put({"output": sent})
    found = Inbox(shared.descriptor, CUDA).take(message)["output"]
    assert len(refused) == 2
    assert torch.equal(found + 1, sent + 1)
