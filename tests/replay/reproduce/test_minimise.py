"""The smallest failing parts of calls are found for kernels that are wrong in one place."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from capture.call.attention_call import AttentionCall
from replay.reproduce.minimise import minimise
from replay.reproduce.trials import TrialOutcome
from replay.rows.errors_of_output import Where
from tests.factories import accuracy, errors, random_call, row

WRONG = TrialOutcome("inaccurate", "max abs error 1")
RIGHT = TrialOutcome("ok", "")
CALL = random_call(batch=3, q_heads=8, kv_heads=4, q_len=40, kv_len=50, with_output=True)


def kernel(fails: Callable[[AttentionCall], bool]) -> Callable[[AttentionCall], TrialOutcome]:
    return lambda call: WRONG if fails(call) else RIGHT


def has(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True if a row of D numbers occurs in another tensor."""
    return bool((other == tensor).all(dim=-1).any())


def test_one_key_head_one_query_and_one_key() -> None:
    query, key = CALL.query[1, 5, 17], CALL.key[1, 2, 33]
    found = minimise(
        CALL, WRONG, kernel(lambda call: has(query, call.query) and has(key, call.key)), 60.0
    )
    assert found.call.shape == (1, 2, 1, 1, 1, 32, 32)
    assert torch.equal(found.call.query[0, 1, 0], query)
    assert torch.equal(found.call.key[0, 0, 0], key)
    assert found.kept["key heads"] == (2, 3)
    assert found.kept["queries"] == (17, 18)
    assert found.is_derived
    assert found.call.output is None
    assert found.is_complete


def test_a_length_that_must_be_odd_and_above_a_block() -> None:
    call = random_call(q_len=41, kv_len=50)
    fails = kernel(lambda call: call.shape.q_len % 2 == 1 and call.shape.q_len > 16)
    found = minimise(call, WRONG, fails, 60.0)
    assert found.call.shape.q_len == 17
    assert found.call.shape.kv_len == 1


RAISES = TrialOutcome("error", "ValueError: {} queries")
SHORT = TrialOutcome("error", "ValueError: too few queries")
NAN = TrialOutcome.of(row(status="inaccurate", accuracy=accuracy(errors(mismatched_nonfinite=3))))


@pytest.mark.parametrize(
    ("whole", "short"), [(WRONG, SHORT), (WRONG, NAN), (NAN, WRONG), (RAISES, SHORT)]
)
def test_another_failure_is_not_followed(whole: TrialOutcome, short: TrialOutcome) -> None:
    """The kernel fails in another way on short calls; numbers in a message may differ."""

    def run(call: AttentionCall) -> TrialOutcome:
        reason = whole.reason.format(call.shape.q_len)
        return replace(whole, reason=reason) if call.shape.q_len > 7 else short

    assert minimise(CALL, run(CALL), run, 60.0).call.shape.q_len == 8


def test_the_worst_place_is_tried_first() -> None:
    tried = []

    def run(call: AttentionCall) -> TrialOutcome:
        tried.append(call.shape)
        return RIGHT

    where = Where(1.0, 0.0, (1, 6), (3, 4), ((0.0,),))
    minimise(CALL, TrialOutcome("inaccurate", "", "exact", where, (2, 0, 31)), run, 60.0)
    assert tried[0] == (1, 8, 4, 40, 50, 32, 32)
    seen = [shape for shape in tried if shape.q_len in (1, 2)]
    assert [shape.q_len for shape in seen[:2]] == [1, 2]


def test_the_search_ends_in_time() -> None:
    now = iter(range(1000))
    found = minimise(CALL, WRONG, kernel(lambda call: True), 3, clock=lambda: next(now))
    assert not found.is_complete
    assert 0 < found.trials <= 3


def test_call_without_keys_is_minimised() -> None:
    call = random_call(batch=2, q_heads=4, kv_heads=2, kv_len=0)
    found = minimise(call, WRONG, kernel(lambda call: True), 60.0)
    assert found.call.shape == (1, 2, 1, 1, 0, 32, 32)
    assert found.is_complete
