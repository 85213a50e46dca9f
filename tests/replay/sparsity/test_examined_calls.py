"""Time limit of an examination, which a later examination goes on with."""

from typing import Any

import pytest
import torch

from benchmarks.emulated_block_sparse import NAME
from replay.distribution.time_limit import TimeLimit
from replay.end_to_end.run_pace import RunPace
from replay.sparsity import pace
from replay.sparsity.examined_calls import Examination, examine
from replay.sparsity.kernel import SparseKernel
from replay.sparsity.pace import Pace, pace_of
from replay.sparsity.settings import Setting
from tests.factories import made_workload, random_call

CALLS = {name: random_call(q_len=64, kv_len=length) for name, length in [("a", 64), ("b", 128)]}


def test_examination_goes_on_where_the_time_ended() -> None:
    now, progress, found = [0.0], RunPace(), Examination()

    def paced(*timed: Any) -> Pace:
        now[0] += 10.0
        return Pace(0.1, 0.8) if now[0] == 10.0 else Pace(1.0, 0.8)

    workloads = [
        made_workload(name, lambda device, call=call: call) for name, call in CALLS.items()
    ]
    own = dict.fromkeys(CALLS, "torch-default")
    kernel, settings = SparseKernel(NAME, lambda call: (8, 8), paced), [Setting("keep", 0.5)]
    for names in (["a"], ["a", "b"]):
        limit = TimeLimit(5.0, lambda: now[0])
        examine(workloads, kernel, settings, own, torch.device("cpu"), progress, limit, found)
        assert [name for name in CALLS if found.has(name)] == names
    assert progress.done == 2
    assert [*found.calls] == ["a"]
    assert found.left_out == {
        "b": "the model's own attention is faster than any share of the blocks"
    }


@pytest.mark.parametrize(("seconds", "calls"), [(34.0, 2), (1.0, 1)])
def test_slow_kernel_is_not_timed(
    monkeypatch: pytest.MonkeyPatch, seconds: float, calls: int
) -> None:
    called: list[Any] = []
    # Each call takes a second, so 7 calls with a quarter of the blocks and 7 with all take 35 s.
    monkeypatch.setattr(pace, "first_call", lambda *given: called.append(given) or (None, 1000.0))
    limit = TimeLimit(seconds, lambda: float(len(called)))
    with pytest.raises(TimeoutError):
        pace_of(CALLS["a"], NAME, "torch-default", 8, limit)
    assert len(called) == calls
