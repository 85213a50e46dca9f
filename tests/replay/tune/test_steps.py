"""Tuning of a denoiser: recorded steps, and plans whose kernels depend on the step."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import attention_replay as ar
from capture.storage.dataset import Dataset
from replay.report.tuning import used_kernels
from replay.tune.recorded_calls import chosen_steps, size
from tests.replay.api.test_tune_model import INT8, SECONDS, Layer, with_times, without_times

SIGNATURE = {
    "query": (1, 2, 8, 16),
    "key": (1, 2, 8, 16),
    "value": (1, 2, 8, 16),
    "dtype": "float16",
    "mask": None,
}
CALL_BYTES = 4 * 2 * 8 * 16 * 2


def census(*ranges: tuple[str, str, int, int]) -> dict[str, object]:
    names = "module", "phase", "first_step", "last_step"
    rows = [{**dict(zip(names, each, strict=True)), "signature": 0} for each in ranges]
    return {"signatures": [SIGNATURE], "rows": rows}


TWO_DENOISERS = census(
    ("high", "denoise", 0, 15), ("low", "denoise", 16, 49), ("text", "encode", 0, 0)
)


@pytest.mark.parametrize(
    ("counts", "free", "steps", "calls"),
    [
        (TWO_DENOISERS, 10**9, [6, 18, 31, 43], 5),
        (TWO_DENOISERS, 2 * 3 * CALL_BYTES, [12, 37], 3),
        (TWO_DENOISERS, 0, [24], 2),
        (census(("block", "denoise", 0, 1)), 10**9, [0, 1], 2),
        (census(("layer", "prefill", 0, 0), ("layer", "decode", 1, 9)), 0, [], 2),
    ],
)
def test_recorded_steps_are_spread_and_fit_on_the_disk(
    counts: dict[str, object], free: int, steps: list[int], calls: int
) -> None:
    assert chosen_steps(counts, free) == steps
    assert size(counts, steps) == (calls, calls * CALL_BYTES)


class Denoiser(nn.Module):
    """Two layers of attention, whose input is harder for 8 bits at late steps."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, hidden_states: Tensor, timestep: int) -> Tensor:
        for layer in self.layers:
            hard = hidden_states.clone()
            hard[..., 3] *= 1.0 if timestep < 4 else 8.0
            hidden_states = hidden_states + layer(hard) - hard
        return hidden_states


def test_kernel_runs_only_at_the_steps_where_it_is_exact_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_times(monkeypatch)
    torch.manual_seed(0)
    model = Denoiser().eval()
    start = torch.randn(1, 48, 32)

    def run() -> Tensor:
        states = start
        for step in range(8):
            states = states + 0.1 * model(states, step)
        return states

    def tuned(limit: float) -> ar.Tuning:
        kernels, out = ["torch-flash", INT8], tmp_path / "plan.json"
        budget = f"relative_l1={limit!r}"
        return ar.tune(model, run, budget, kernels=kernels, out=out, rounds=1, progress=False)

    tuned(1.0)
    directory = tmp_path / "plan.json.tuning"
    capture = Dataset.open(str(directory / "recording")).captures[0]
    steps = sorted(call.origin.step for call in ar.load(directory / "recording"))
    assert steps == [0, 0, 2, 2, 4, 4, 6, 6]
    assert capture.complete
    with_times(directory, {**SECONDS, "torch-flash": SECONDS["torch-default"]})
    everywhere = tuned(1.0)
    assert everywhere.plan is not None
    assert everywhere.quality is not None
    assert used_kernels(everywhere.plan) == f"{INT8} in 2 of 2 layers"
    some = tuned(everywhere.quality.worst / 4)
    assert some.plan is not None
    assert used_kernels(some.plan) == f"{INT8} in 2 of 2 layers at steps 0 to 3"
    assert f"{INT8} in 2 of 2 layers at steps 0 to 3; " in str(some)
