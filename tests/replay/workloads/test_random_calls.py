"""Synthetic calls have published shapes and reproducible values; bad sizes are refused."""

from dataclasses import replace

import pytest
import torch

from replay.workloads.call_sizes import ShapeError
from replay.workloads.random_calls import Spec, suite
from replay.workloads.workload import random_workloads

CPU = torch.device("cpu")
SMALL = Spec(1, 4, 2, 5, 7, 8, 16)


def test_suite_can_have_another_dtype_and_longest_shape() -> None:
    assert all(spec.dtype == torch.bfloat16 for spec in suite("sage"))
    assert all(spec.dtype == torch.float16 for spec in suite("sage", "float16"))
    assert {spec.longest for spec in suite("sage", longest=2048)} == {1024, 2048}
    with pytest.raises(ShapeError, match=r"--max-seq 100 excludes every shape of flux.* 4224"):
        suite("flux", longest=100)


def test_seed_reproduces_and_every_call_differs() -> None:
    first, second = random_workloads("random", [SMALL, SMALL], seed=5)
    assert (first.name, second.name) == ("random-00", "random-01")
    again = random_workloads("random", [SMALL, SMALL], seed=5)[0]
    other = random_workloads("random", [SMALL, SMALL], seed=7)[0]
    values = first.load(CPU).query
    assert torch.equal(values, again.load(CPU).query)
    assert torch.equal(values, first.load(CPU).query)
    assert not torch.equal(values, second.load(CPU).query)
    assert not torch.equal(values, other.load(CPU).query)


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"batch": 0}, "-b must be at least 1, not 0"),
        ({"kv_len": -3}, "-sk must be at least 1, not -3"),
        ({"v_head_dim": 0}, "-dv must be at least 1, not 0"),
        ({"q_heads": 6, "kv_heads": 4}, "-hq 6 is not a multiple of -hk 4"),
        ({"kv_len": 10**18}, "too large for any machine"),
    ],
)
def test_impossible_sizes_are_refused(changed: dict[str, int], sentence: str) -> None:
    with pytest.raises(ShapeError, match=sentence):
        replace(SMALL, **changed)  # type: ignore[arg-type]
