"""Synthetic calls have published shapes and reproducible values; bad sizes are refused."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from replay.api.call_choices import RandomCalls
from replay.workloads.call_sizes import ShapeError
from replay.workloads.random_calls import Spec, suite
from replay.workloads.suites import sizes_of
from replay.workloads.workload import random_workloads

CPU = torch.device("cpu")
SMALL = Spec(1, 4, 2, 5, 7, 8, 16)


def test_suite_can_have_another_dtype_and_longest_shape() -> None:
    assert {spec.dtype for spec in suite("sage", "float16")} == {torch.float16}
    assert {spec.longest for spec in suite("sage", longest=2048)} == {1024, 2048}


SHAPES = """
[[shapes]]
q_heads = 4
kv_heads = [2, 4]
q_len = [1, 64]
causal = [false, true]
[[shapes]]
q_heads = 4
q_len = 64
"""


def test_sweeps_have_a_call_for_each_combination(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(SHAPES)
    shapes = sizes_of(str(path))
    assert len(shapes) == len({*shapes}) == 8  # the second group is part of the first
    assert (shapes[1].kv_heads, shapes[1].q_len, shapes[1].kv_len) == (2, 64, 64)
    calls = RandomCalls(q_len=(64, 128), head_dim=(32, 64), v_head_dim=(16,))
    sizes = [tuple(spec.shape)[3:] for spec in calls.found(None, quiet=True).specs]
    with pytest.raises(ShapeError, match="make 1,001 calls, and at most 1,000 are allowed"):
        RandomCalls(q_len=tuple(range(1, 1002))).check()
    assert sizes == [(64, 64, 32, 16), (128, 128, 32, 16), (64, 64, 64, 16), (128, 128, 64, 16)]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("q_len = 5", "unknown table 'q_len', allowed: shapes$"),
        ("[[shapes]]\nlength = 5", "unknown key 'length', allowed: batch, .*, q_len, .*, causal$"),
        ("[[shapes]]\nq_len = [5, true]", "q_len must be an integer of at least 1, or a list"),
        ("[[shapes]]\nq_len = 0", "q_len must be an integer of at least 1, .* not 0"),
        ("[[shapes]]\nq_len = []", "q_len must be an integer"),
        ("[[shapes]]\ncausal = 1", "causal must be true, false, or a list of these, not 1"),
        ("[[shapes]]\n[[shapes]]\nkv_heads = 5", "number 2: 16 query heads cannot share 5"),
        ("[shapes]\nq_len = 5", r"needs \[\[shapes\]\] with lines such as"),
        ("shapes = []", r"needs \[\[shapes\]\]"),
        ("[[shapes", "is not TOML"),
    ],
)
def test_unusable_file_of_shapes_is_refused(tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(ShapeError, match=sentence):
        sizes_of(str(path))


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
        ({"q_heads": 6, "kv_heads": 4}, "6 query heads cannot share 4 key/value heads"),
    ],
)
def test_impossible_sizes_are_refused(changed: dict[str, int], sentence: str) -> None:
    with pytest.raises(ShapeError, match=sentence):
        replace(SMALL, **changed)  # type: ignore[arg-type]
