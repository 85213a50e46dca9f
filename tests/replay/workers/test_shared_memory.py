"""What one process puts there, another takes."""

from __future__ import annotations

from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from replay.workers import shared_memory
from replay.workers.shared_memory import CHUNK_BYTES, Inbox, Outbox

CPU = torch.device("cpu")


def tensors() -> dict[str, Tensor]:
    whole = torch.arange(2 * 3 * 5 * 4, dtype=torch.float32).view(2, 3, 5, 4)
    return {
        "output": whole.to(torch.bfloat16),
        "transposed": whole.mT,
        "expanded": whole[:1].expand(4, -1, -1, -1),
        "chosen": whole > 7,
        "empty": whole[:, :, :0],
        "scalar": torch.tensor(3.5, dtype=torch.float64),
    }


def test_tensors_arrive_as_they_were(tmp_path: Path) -> None:
    found = Inbox().take(Outbox(str(tmp_path)).put(tensors()), CPU)
    assert found.keys() == tensors().keys()
    for name, tensor in tensors().items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


def test_nothing_at_all(tmp_path: Path) -> None:
    assert Inbox().take(Outbox(str(tmp_path)).put({}), CPU) == {}


def test_what_was_taken_stays_when_the_next_is_put(tmp_path: Path) -> None:
    outbox, inbox = Outbox(str(tmp_path)), Inbox()
    first = inbox.take(outbox.put({"output": torch.ones(9)}), CPU)["output"]
    second = inbox.take(outbox.put({"output": torch.zeros(9)}), CPU)["output"]
    assert first.all()
    assert not second.any()


def test_larger_ones_and_another_sender(tmp_path: Path) -> None:
    """Each finds out by itself that the file has grown, and none makes it shorter."""
    one, other, inbox = Outbox(str(tmp_path)), Outbox(str(tmp_path)), Inbox()
    for sender, elements in ((one, 10), (other, CHUNK_BYTES), (one, 20), (one, CHUNK_BYTES + 1)):
        sent = torch.randn(elements)
        assert torch.equal(inbox.take(sender.put({"output": sent}), CPU)["output"], sent)
    assert len(list(tmp_path.iterdir())) == 1


def _take_and_add(message: dict[str, Any], directory: str, answers: Any) -> None:
    found = Inbox().take(message, CPU)["output"]
    answers.put(Outbox(directory).put({"output": found + 1}))


def test_another_process(tmp_path: Path) -> None:
    spawn, sent = get_context("spawn"), torch.randn(100)
    message = Outbox(str(tmp_path)).put({"output": sent})
    answers = spawn.SimpleQueue()
    process = spawn.Process(target=_take_and_add, args=(message, str(tmp_path), answers))
    process.start()
    process.join()
    assert torch.equal(Inbox().take(answers.get(), CPU)["output"], sent + 1)


def test_a_full_disk_is_an_error_before_anything_is_mapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mapping with holes would end the process instead."""
    monkeypatch.setattr(shared_memory, "CHUNK_BYTES", 512)
    (tmp_path / "tensors").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        Outbox(str(tmp_path)).put({"output": torch.ones(10_000)})


def test_a_message_that_promises_more_than_there_is(tmp_path: Path) -> None:
    message = Outbox(str(tmp_path)).put({"output": torch.ones(4)})
    message["tensors"]["output"][1] = [CHUNK_BYTES]
    with pytest.raises(ValueError, match="buffer"):
        Inbox().take(message, CPU)
