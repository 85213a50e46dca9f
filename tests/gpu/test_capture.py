"""Recording on a GPU copies tensors while the model runs, with their values at the call."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from capture import load, record
from capture.cli.file_checks import check_files
from capture.recording import copies
from capture.recording.counts import RecordingCounts


class ChangesInPlace(nn.Module):
    """Attention over views of a buffer that is overwritten afterwards, as in static caches."""

    def __init__(self, length: int = 2048) -> None:
        super().__init__()
        self.heads, self.head_dim = 8, 64
        self.packed = torch.empty(
            1, length, 3, self.heads, self.head_dim, device="cuda", dtype=torch.bfloat16
        )
        self.mask = torch.zeros(1, 1, 1, length, device="cuda", dtype=torch.bfloat16)

    def forward(self, seed: int) -> Tensor:
        generator = torch.Generator("cuda").manual_seed(seed)
        self.packed.normal_(generator=generator)
        query, key, value = (part.transpose(1, 2) for part in self.packed.unbind(2))
        mask = self.mask.expand(1, self.heads, query.shape[2], -1)
        output = F.scaled_dot_product_attention(query, key, value, mask)
        copied = output.clone()
        output.fill_(float("nan"))
        self.packed.fill_(float("nan"))
        return copied


class SelfAttention(nn.Module):
    """Model with a single call."""

    def forward(self, states: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(states, states, states)


@pytest.mark.parametrize("has_room", [True, False], ids=["plenty", "no_room"])
@pytest.mark.parametrize("options", [{}, {"durable": True}, {"buffer_bytes": 1 << 20}])
def test_recorded_call_is_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_room: bool, options: dict[str, Any]
) -> None:
    if not has_room:
        monkeypatch.setattr(copies.HostCopier, "_staged_on", lambda self, gpu, sources: None)
    model = ChangesInPlace()
    seeds = range(12)
    expected = [model(seed).cpu() for seed in seeds]
    with record(model, tmp_path, max=5, **options) as recording:
        outputs = [model(seed) for seed in seeds]
    assert recording.problems == []
    assert recording.kept == 5
    assert all(torch.equal(a.cpu(), b) for a, b in zip(outputs, expected, strict=True))
    data = load(tmp_path)
    assert {finding.text for finding in check_files(data)} == {"intact; output bit-identical"}
    for call in data:
        assert call.output is not None
        assert torch.equal(call.output, expected[call.origin.call_index])
        assert call.query.stride() == model.packed[:, :, 0].transpose(1, 2).stride()


def test_tensors_on_two_devices_arrive() -> None:
    """Lengths of sequences may stay on the CPU."""
    tensors = {"seqused_k": torch.arange(3), "query": torch.randn(1, 2, 5, 8, device="cuda")}
    expected = {name: tensor.cpu().clone() for name, tensor in tensors.items()}
    copier = copies.HostCopier(1 << 20, RecordingCounts())
    copy = copier.copy(tensors)
    for tensor in tensors.values():
        tensor.zero_()
    values = copy.arrival.result().tensors
    assert all(torch.equal(values[name], expected[name]) for name in tensors)
    copier.close()


def test_buffers_are_used_again_and_released(tmp_path: Path) -> None:
    model = ChangesInPlace()
    with record(model, tmp_path, max=3, output=False) as recording:
        for seed in range(40):
            model(seed)
    assert recording.problems == []
    assert recording._writer is not None
    assert recording._writer._copier.pool.nbytes == 0
    assert recording.counts.written_bytes < 1.1 * load(tmp_path).nbytes


def test_model_does_not_wait_for_the_disk(tmp_path: Path) -> None:
    """`record` takes the calls while they are still in the GPU's queue."""
    model = ChangesInPlace()
    with record(model, tmp_path, max=2, sample="first"):
        model(0)
        torch.cuda.synchronize()
        torch.cuda._sleep(10**9)
        model(1)
        assert not torch.cuda.current_stream().query()


def test_cuda_graph_is_captured_while_recording(tmp_path: Path) -> None:
    model = SelfAttention()
    states = torch.randn(2, 4, 16, 32, device="cuda")
    with record(model, tmp_path) as recording:
        expected = model(states)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = model(states)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(output, expected)
    assert recording.kept == 1
    assert "refused: 1 (while a CUDA graph is captured)" in recording.summary
    assert recording.problems == []
